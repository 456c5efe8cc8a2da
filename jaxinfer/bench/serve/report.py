"""The figures of a run, as data and as text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from jaxinfer.bench.report import as_text as as_table
from jaxinfer.bench.serve.checks import Check, run_checks
from jaxinfer.bench.serve.overhead import overhead_report, overhead_warnings
from jaxinfer.bench.serve.records import Record
from jaxinfer.bench.serve.run import Run
from jaxinfer.bench.serve.slo import goodput
from jaxinfer.bench.serve.stats import PERCENTILES, summary

_LATENCIES = ("ttft_s", "tpot_s", "itl_s", "e2e_s", "client_queue_s", "ttft_after_sent_s")


def summarize(run: Run, checks: Sequence[Check], slo: Mapping[str, float]) -> dict[str, Any]:
    """Counts, throughput, latencies in seconds, goodput where there is an `slo`, checks, and the client's own part."""
    records = run.records
    good = [record for record in records if record.ok]
    latencies = _latencies(good)
    client = overhead_report(run.monitor, records)
    num_output_tokens = sum(record.num_tokens for record in good)
    results: dict[str, Any] = {
        "requests": {
            "num": len(records),
            "num_ok": len(good),
            "errors": dict(Counter(r.error for r in records if r.error is not None)),
            "finish_reasons": dict(Counter(r.finish_reason for r in good if r.finish_reason is not None)),
        },
        "duration_s": run.duration_s,
        "requests_per_s": len(good) / run.duration_s,
        "output_tokens_per_s": num_output_tokens / run.duration_s,
        "num_output_tokens": num_output_tokens,
        "num_prompt_tokens": sum(record.prompt_tokens or 0 for record in good),
        "num_cached_tokens": sum(record.cached_tokens or 0 for record in good),
        "num_chunks": sum(len(record.text_s) for record in good),
        "latency": {name: summary(values) for name, values in latencies.items()},
    }
    if slo:
        results["goodput"] = {"slo_s": dict(slo), **goodput(records, slo, run.duration_s)}
    results["client"] = client
    results["warnings"] = overhead_warnings(client, latencies["ttft_s"], latencies["itl_s"])
    results["checks"] = run_checks(checks, records)
    return results


def _latencies(good: Sequence[Record]) -> dict[str, list[float]]:
    return {
        "ttft_s": [value for record in good if (value := record.ttft_s) is not None],
        "tpot_s": [value for record in good if (value := record.tpot_s) is not None],
        "itl_s": [gap for record in good for gap in record.gaps_s],
        "e2e_s": [value for record in good if (value := record.e2e_s) is not None],
        # TTFT counts from the scheduled moment; these two say how much of it was the client's limit on concurrency.
        "client_queue_s": [record.sent_s - record.due_s for record in good],
        "ttft_after_sent_s": [record.first_s - record.sent_s for record in good if record.first_s is not None],
    }


def failed(results: Mapping[str, Any]) -> bool:
    """Whether a check did not hold, or nothing was measured."""
    nothing = "requests" in results and not results["requests"]["num_ok"]
    return nothing or any(check["num_failed"] for check in results["checks"])


def as_text(report: Mapping[str, Any]) -> str:
    """The report for people."""
    lines = [f"{name:<12} {value}" for name, value in report["environment"].items()]
    lines.append("settings     " + ", ".join(f"{name}={value}" for name, value in report["settings"].items()))
    results = report["results"]
    if "comparison" in results:
        return "\n".join([as_table({**report, "results": results["comparison"]}), "", *_check_lines(results["checks"])])
    if "search" in results:
        lines += ["", *_search_lines(results["search"])]
    lines += ["", *run_lines(results)]
    return "\n".join(lines)


def run_lines(results: Mapping[str, Any]) -> list[str]:
    """The figures of one run."""
    requests = results["requests"]
    errors = ", ".join(f"{number} {name}" for name, number in requests["errors"].items())
    reasons = ", ".join(f"{number} {name}" for name, number in requests["finish_reasons"].items())
    lines = [
        f"requests     {requests['num_ok']} of {requests['num']} answered in {results['duration_s']:.2f} s"
        + (f"; {errors}" if errors else ""),
        f"finished by  {reasons or 'nothing'}",
        f"tokens       {results['num_prompt_tokens']} prompt ({results['num_cached_tokens']} cached), "
        f"{results['num_output_tokens']} output in {results['num_chunks']} chunks",
        f"throughput   {results['requests_per_s']:.3f} requests/s, "
        f"{results['output_tokens_per_s']:.2f} output tokens/s",
    ]
    if (good := results.get("goodput")) is not None:
        limits = " ".join(f"{name}:{limit * 1e3:g}ms" for name, limit in good["slo_s"].items())
        lines.append(f"goodput      {good['requests_per_s']:.3f} requests/s, {good['share']:.1%} met {limits}")
    lines += ["", *_latency_table(results["latency"]), "", "client's own part"]
    lines += _latency_table({name: value for name, value in results["client"].items() if isinstance(value, Mapping)})
    lines += [
        f"{'cpu':<18}{results['client']['cpu_share_of_a_core']:.1%} of a core",
        "",
        *_check_lines(results["checks"]),
    ]
    return [*lines, *(f"warning: {warning}" for warning in results["warnings"])]


def _check_lines(checks: Sequence[Mapping[str, Any]]) -> list[str]:
    lines = ["checks"]
    for check in checks:
        if not check["num_checked"]:
            continue
        verdict = "ok" if not check["num_failed"] else f"{check['num_failed']} FAILED"
        lines.append(f"  {check['name']}: {check['num_checked']} checked, {verdict}")
        lines += [f"    {example}" for example in check["examples"]]
    return lines


def _latency_table(latencies: Mapping[str, Mapping[str, float | int] | None]) -> list[str]:
    columns = ("mean", *(f"p{percent}" for percent in PERCENTILES), "max")
    lines = [" " * 18 + "".join(f"{column:>11}" for column in columns) + "  ms"]
    for name, found in latencies.items():
        if found is not None:
            values = "".join(f"{found[column] * 1e3:>11.2f}" for column in columns)
            lines.append(f"{name.removesuffix('_s'):<18}{values}")
    return lines


def _search_lines(search: Mapping[str, Any]) -> list[str]:
    lines = ["requests/s   met the SLO"]
    lines += [f"{each['rate']:<12.4g} {each['share']:.1%} {'passed' if each['passed'] else ''}".rstrip()
              for each in search["tries"]]  # fmt: skip
    if search["rate"] is None:
        return [*lines, f"no rate tried had {search['wanted_share']:.0%} of its requests within the SLO"]
    above = "no rate above it was tried" if search["failed_rate"] is None else f"{search['failed_rate']:.4g} did not"
    return [*lines, f"highest rate with {search['wanted_share']:.0%} within the SLO: {search['rate']:.4g}/s; {above}"]
