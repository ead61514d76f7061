# llama3-8b TP1 on 1 chip of h100-sxm: sglang 0.5.1, flags as in its documentation of main
# (004813e).

# server on node0, chip 0
CUDA_VISIBLE_DEVICES=0 python -m sglang.launch_server --model-path meta-llama/Meta-Llama-3-8B \
  --dtype bfloat16 --kv-cache-dtype auto --context-length 1280 --mem-fraction-static 0.88 \
  --max-running-requests 2048 --chunked-prefill-size 8192 --page-size 1 --host 0.0.0.0 \
  --port 30000 --speculative-algorithm NGRAM --speculative-num-draft-tokens 5 \
  --speculative-ngram-max-bfs-breadth 1
