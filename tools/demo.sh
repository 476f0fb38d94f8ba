#!/usr/bin/env bash
# From nothing to a trained model in a few minutes on two CPU cores: tokenizer, data, training on a tp 4 x pp 2 mesh,
# resuming on tp 2 x pp 2 x dp 2, sampling. Usage: BIN=.venv/bin tools/demo.sh FOLDER
set -euo pipefail

out=${1:?a folder for what the demo makes}
bin=${BIN:?the folder with python and torchrun}
export OMP_NUM_THREADS=1  # eight processes share the cores

say() { printf '\n\033[1m%s\033[0m\n' "$*"; }

rm -rf "$out"
mkdir -p "$out"

# Real text that is already here: the sources of Python's standard library, without its tests.
library=$("$bin/python" -c 'import os; print(os.path.dirname(os.__file__))')
corpus=(--input "$library" --glob '**/*.py' --exclude test tests idle_test site-packages dist-packages)

say "1. A tokenizer of 4,096 pieces from the standard library's sources"
"$bin/python" tools/train_tokenizer.py "${corpus[@]}" --vocab-size 4096 --output "$out/tokenizer.model"

say "2. The sources as token ids"
"$bin/python" tools/preprocess_data.py "${corpus[@]}" --tokenizer "$out/tokenizer.model" --output "$out/corpus" --workers 2

run=(pretrain_gpt.py --config demo --data-path "$out/corpus" --tokenizer "$out/tokenizer.model" --log-dir "$out/log"
     --save "$out/checkpoints" --global-batch-size 16 --micro-batch-size 8 --lr 5e-3 --min-lr 5e-4 --warmup-steps 20
     --eval-interval 60 --eval-steps 8)

say "3. Pre-training on 8 processes: tensor parallel 4 x pipeline parallel 2"
"$bin/torchrun" --nproc-per-node 8 "${run[@]}" --tp 4 --pp 2 --train-steps 240

say "4. Resuming on another layout: tensor parallel 2 x pipeline parallel 2 x data parallel 2"
"$bin/torchrun" --nproc-per-node 8 "${run[@]}" --tp 2 --pp 2 --micro-batch-size 4 --train-steps 260 --override-schedule \
    --load "$out/checkpoints"

say "5. A text from the model"
"$bin/python" tools/generate.py --load "$out/checkpoints" --prompt $'def read_file(path):\n    ' --max-new-tokens 80

"$bin/python" - "$out/log/metrics.jsonl" <<'EOF'
import json, sys

rows = [json.loads(line) for line in open(sys.argv[1])]
first, last = rows[0]["loss"], [row["eval_loss"] for row in rows if "eval_loss" in row][-1]
print(f"\nThe loss fell from {first:.2f} (ln 4096 = 8.32) to {last:.2f} on text the model has not seen.")
if not last < 5.0:
    sys.exit("demo: a loss below 5.0 was expected")
EOF

cat <<EOF

Try next:
  $bin/python tools/generate.py --load $out/checkpoints --prompt 'import ' --temperature 0.5
  $bin/torchrun --nproc-per-node 4 pretrain_gpt.py --config tiny --tp 2 --pp 2 --mock-data --train-steps 20
  $bin/python pretrain_gpt.py --help
EOF
