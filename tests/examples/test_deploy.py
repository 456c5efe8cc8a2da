"""The deployment examples name flags, paths and files that exist."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from jaxinfer.serve.cli import make_parser

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "examples" / "deploy"
FLAGS = {flag for action in make_parser()._actions for flag in action.option_strings}


def test_the_kubernetes_example_fits_the_server():
    deployment, service = yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())
    pod = deployment["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    args = container["args"]
    assert {arg for arg in args if arg.startswith("-")} <= FLAGS
    assert pod["terminationGracePeriodSeconds"] > int(args[args.index("--drain-timeout") + 1])
    probes = {name: container[f"{name}Probe"]["httpGet"]["path"] for name in ("startup", "liveness", "readiness")}
    assert probes == {"startup": "/health", "liveness": "/health", "readiness": "/ready"}
    assert service["spec"]["selector"] == deployment["spec"]["template"]["metadata"]["labels"]


def test_the_other_examples_name_what_there_is():
    for name in ("Dockerfile", "jaxinfer.service"):
        text = (DEPLOY / name).read_text()
        lines = [line for line in text.splitlines() if not line.startswith("#")]
        own = {flag for line in lines if "jaxinfer.serve" in line for flag in re.findall(r"--[a-z-]+", line)}
        assert own and own <= FLAGS
    copied = re.findall(r"^COPY (.+) \S+$", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE)
    assert all((ROOT / name).exists() for names in copied for name in names.split())
