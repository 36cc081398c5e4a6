#!/usr/bin/env bash
# Measure on one GPU, in stages that each stand alone; docs/gpu.md says what the columns mean.
#
#   tests/gpu/run.sh                                  every stage, under 8 minutes
#   tests/gpu/run.sh --stage attention --out a.json   one stage (may be repeated)
#   tests/gpu/run.sh --dry                            the same code on the CPU, tiny shapes
#
# Runs from the source tree, without network. PYTHON chooses the interpreter: .venv/bin/python when there is one. The
# stages attention and train need torch, triton, numpy, pydantic, pyyaml and safetensors; serve, swap and capture the
# project's whole environment (make setup).
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
python="${PYTHON:-$root/.venv/bin/python}"
[ -x "$python" ] || python="$(command -v python3)"
path="$root/tests/support:$root/tests/gpu"
for room in "$root"/packages/* "$root"/services/*; do path="$path:$room"; done
export PYTHONPATH="$path${PYTHONPATH:+:$PYTHONPATH}"
exec "$python" -m stages "$@"
