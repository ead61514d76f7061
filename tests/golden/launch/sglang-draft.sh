# llama3.1-70b TP4 on 4 chips of h100-sxm: sglang 0.5.1, flags as in its documentation of main
# (004813e).
# * The draft is quantised as the target is unless --speculative-draft-model-quantization unquant is
#   added; it is priced in its own weights.

# server on node0, chips 0-3
CUDA_VISIBLE_DEVICES=0,1,2,3 python -m sglang.launch_server --model-path meta-llama/Llama-3.1-70B \
  --tp-size 4 --dtype bfloat16 --kv-cache-dtype auto --context-length 1280 \
  --mem-fraction-static 0.88 --max-running-requests 2048 --chunked-prefill-size 8192 --page-size 1 \
  --host 0.0.0.0 --port 30000 --speculative-algorithm STANDALONE \
  --speculative-draft-model-path meta-llama/Llama-3.2-1B --speculative-num-steps 3 \
  --speculative-eagle-topk 1 --speculative-num-draft-tokens 4
