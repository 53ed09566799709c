#!/usr/bin/env bash
# Seconds from `git clone` to the first own number, on a machine that has torch and transformers. Needs no network.
#
#     bash benchmarks/first_number.sh [SOURCE] [JSON]     SOURCE: a clone, its address, or a bundle of git; default: .
#
# Does what README.md says: a clone, `pip install .`, and its recipe for transformers' Trainer, with a Llama of 0.2B
# parameters. The number is what `float8()` leaves of what is saved for the backward. Caches of compilers are new.
set -euo pipefail
source_=${1:-.} json=${2:-/dev/stdout}
[[ -e $source_ ]] && source_=$(realpath "$source_")
json=$(realpath "$json")
python=${PYTHON:-python3}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export TORCHINDUCTOR_CACHE_DIR="$work/inductor" TRITON_CACHE_DIR="$work/triton"
began=$(date +%s.%N)

git -c advice.detachedHead=false clone --quiet "$source_" "$work/aot-hooks"
cloned=$(date +%s.%N)

# What `pip install .` does where a network is; torch, triton, scipy and setuptools are here already.
"$python" -m pip install --quiet --no-index --no-build-isolation --no-deps --target "$work/site" "$work/aot-hooks"
installed=$(date +%s.%N)

cat >"$work/train.py" <<'PY'
import json
import pathlib
import sys

import torch
import transformers

import aot_hooks
from aot_hooks.integrations.transformers import AotHooksCallback

small = not torch.cuda.is_available()
width, layers, words, length = (64, 2, 128, 16) if small else (1024, 8, 32000, 2048)
config = transformers.LlamaConfig(
    hidden_size=width, intermediate_size=4 * width, num_hidden_layers=layers, num_attention_heads=max(width // 64, 1),
    vocab_size=words, max_position_embeddings=length, use_cache=False,
)
model = transformers.LlamaForCausalLM(config).to("cpu" if small else "cuda", torch.bfloat16)
data = [{"input_ids": row, "labels": row} for row in torch.randint(words, (32, length))]
arguments = transformers.TrainingArguments(
    "out", max_steps=4, logging_steps=2, report_to=[], save_strategy="no", torch_compile=True, use_cpu=small,
    per_device_train_batch_size=4,
)
trainer = transformers.Trainer(model, arguments, train_dataset=data)
AotHooksCallback(aot_hooks.float8()).add_to(trainer)
trainer.train()
numbers = next(log for log in trainer.state.log_history if "aot_hooks/saved_mib" in log)
device = "CPU" if small else torch.cuda.get_device_name()
found = {"device": device, "torch": torch.__version__, "transformers": transformers.__version__}
found |= {name.rpartition("/")[2]: numbers[name] for name in ("aot_hooks/saved_mib", "aot_hooks/packed_mib")}
pathlib.Path(sys.argv[1]).write_text(json.dumps(found))
PY
(cd "$work" && PYTHONPATH="$work/site" "$python" -W ignore train.py "$work/found.json" >&2)
done_=$(date +%s.%N)

commit=$(git -C "$work/aot-hooks" rev-parse HEAD)
"$python" - "$work/found.json" "$commit" "$began" "$cloned" "$installed" "$done_" >"$json" <<'PY'
import datetime
import json
import sys

found = json.load(open(sys.argv[1]))
began, *ends = map(float, sys.argv[3:])
parts = dict(zip(("clone_s", "install_s", "first_number_s"), (b - a for a, b in zip((began, *ends), ends))))
date = datetime.datetime.fromtimestamp(began, datetime.timezone.utc).isoformat(timespec="seconds")
print(json.dumps({**found, "commit": sys.argv[2], "date": date, **parts, "all_s": ends[-1] - began}, indent=1))
PY
