#!/bin/sh
# What `make setup` runs: a private uv in .tools, the locked packages and this project in .venv.
# Needs Python 3.11, 3.12 or 3.13 and a package index; takes the index from uv's own settings, else from pip's.
set -eu

UV_VERSION=0.13.9
MODE=${1:-setup}

fail() {
    echo "error: $1" >&2
    exit 2
}

# SGLang's wheel says which: it has none for 3.14 yet. The oldest first, as most wheels exist for it.
find_python() {
    for candidate in python3.11 python3.12 python3.13 python3; do
        if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null; then
            "$candidate" -c 'import sys; print(sys.executable)'
            return
        fi
    done
    fail "no Python 3.11, 3.12 or 3.13 on PATH (SGLang has wheels for these): install one and run make again"
}

works() {
    [ -x "$1" ] && "$1" --version >/dev/null 2>&1
}

if ! works .tools/bin/uv || [ "$(.tools/bin/uv --version | cut -d' ' -f2)" != "$UV_VERSION" ]; then
    python=$(find_python)
    echo "bringing uv $UV_VERSION"
    "$python" -m venv --clear .tools ||
        fail "$python cannot make a virtual environment: install its venv module (on Debian: python3-venv)"
    .tools/bin/python -m pip install --quiet --disable-pip-version-check "uv==$UV_VERSION" ||
        fail "pip could not install uv $UV_VERSION: check the package index"
fi

# uv does not read pip's settings; a machine whose index is set there only must work too.
if [ -z "${UV_DEFAULT_INDEX:-}${UV_INDEX_URL:-}" ]; then
    index=${PIP_INDEX_URL:-$(.tools/bin/python -m pip config get global.index-url 2>/dev/null || true)}
    if [ -n "$index" ]; then
        export UV_DEFAULT_INDEX="$index"
    fi
fi
export UV_PYTHON_DOWNLOADS=never

if [ "$MODE" = lock ]; then
    .tools/bin/uv pip compile pyproject.toml --group dev --universal --python-version 3.11 \
        --generate-hashes --no-emit-index-url --no-header --quiet --output-file requirements.lock
    exec .tools/bin/python tools/check_lock.py --stamp
fi

.tools/bin/python tools/check_lock.py
if ! works .venv/bin/python; then
    .tools/bin/uv venv --quiet --clear --python .tools/bin/python .venv
fi
.tools/bin/uv pip sync --python .venv/bin/python --require-hashes requirements.lock
members=$(for member in packages/*/pyproject.toml services/*/pyproject.toml; do
    printf ' -e %s' "${member%/pyproject.toml}"
done)
# shellcheck disable=SC2086 # one -e per member; their paths hold no spaces
.tools/bin/uv pip install --python .venv/bin/python --quiet --no-deps --no-build-isolation $members
