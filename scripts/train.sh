#!/usr/bin/env bash
# Train the model of a TOML file. Sets up the Python environment first if necessary (see scripts/setup_env.sh).
#
#   scripts/train.sh CONFIG [--verbose] [any TorchTitan flag]
#
#   scripts/train.sh train_configs/llama3_debug.toml
#   NGPU=2 scripts/train.sh train_configs/llama3_125m.toml --mxnorm.p 1
#   scripts/train.sh train_configs/llama3_debug.toml --help     the usual flags
#
# CONFIG is relative to the current folder or to this checkout. Runs go to outputs/ in the current folder.
# NGPU is the number of processes; the default is one per GPU, or one on a CPU.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup_env.sh"

case "${1:-}" in
"" | -h | --help)
    awk 'NR > 1 { if (!sub(/^# ?/, "")) exit; print }' "${BASH_SOURCE[0]}"
    exit $(($# == 0 ? 2 : 0))
    ;;
esac

config="$1"
shift
if [ ! -e "$config" ] && [ -e "$ROOT/$config" ]; then config="$ROOT/$config"; fi
if [ ! -e "$config" ]; then # reported before minutes of set-up
    say "error: config '$config' does not exist"
    exit 2
fi

setup_env
exec "$PYTHON" -m mxtrain.cli train "$config" "$@"
