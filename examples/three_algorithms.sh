#!/usr/bin/env bash
# One real model, three algorithms, the same start, steps and seed, on one GPU without vLLM:
#
#     bash examples/three_algorithms.sh MODEL OUT [STEPS]
#
# MODEL is a folder or a hub name. OUT gets a run per algorithm and, for the start and for each of them, every answer to
# GSM8K's 1,319 test problems and to MATH-500. Re-run the same command to resume.
set -euo pipefail
model=$1 out=$2 steps=${3:-60}
mkdir -p "$out/answers"

evaluate() { # NAME FOLDER
    for task in gsm8k:1319:300 math500:500:512; do
        IFS=: read -r set problems tokens <<< "$task"
        [ -s "$out/answers/$1-$set.json" ] && continue
        dew eval "$2" --task "$set" --settings '{template: qwen-boxed}' -n "$problems" -k 8 \
            --max-new-tokens "$tokens" --seed 1 --keep "$out/answers/$1-$set.json" | tee "$out/answers/$1-$set.txt"
    done
}

train() { # ALGORITHM SETTINGS
    [ -f "$out/$1/model/config.json" ] || dew train gsm8k/qwen2.5-coder-0.5b-instruct --model_name_or_path "$model" \
        --output_dir "$out/$1" --algorithm "$1" --algorithm_kwargs "$2" --max_steps "$steps"
    evaluate "$1" "$out/$1"
}

evaluate start "$model"
train gtpo '{"dynamic_sampling": true, "oversample": 2.5}'
train dapo '{"dynamic_sampling": true, "oversample": 2.5}'
train grpo '{"dynamic_sampling": false}'
