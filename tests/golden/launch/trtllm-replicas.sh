# llama3-70b TP4xDP3 on 12 chips of h100-sxm: trtllm 1.3, flags as in its documentation of main
# (0434755).
# * Each replica is a server of its own on its own chips and port, with a load balancer of yours in
#   front: trtllm-serve has no option for copies of a whole model.
# * node0 and node1 stand for the addresses of the nodes (--hosts).
# * The memory fraction is KV's share of what is free once all else is loaded; with it 0.9 of the
#   chip is in use, as planned.
# * A server runs until it is stopped: give each command a shell of its own, on the node named above
#   it.
# * 4 of 16 chips stay idle.

# replica 0, server on node0, chips 0-3
cat > replica0.yaml <<'END_OF_FILE'
dtype: bfloat16
enable_chunked_prefill: true
kv_cache_config:
  dtype: auto
  free_gpu_memory_fraction: 0.8565
  tokens_per_block: 32
END_OF_FILE
CUDA_VISIBLE_DEVICES=0,1,2,3 trtllm-serve meta-llama/Meta-Llama-3-70B --tp_size 4 \
  --max_seq_len 1280 --max_batch_size 2048 --max_num_tokens 8192 --host 0.0.0.0 --port 8000 \
  --extra_llm_api_options replica0.yaml

# replica 1, server on node0, chips 4-7
cat > replica1.yaml <<'END_OF_FILE'
dtype: bfloat16
enable_chunked_prefill: true
kv_cache_config:
  dtype: auto
  free_gpu_memory_fraction: 0.8565
  tokens_per_block: 32
END_OF_FILE
CUDA_VISIBLE_DEVICES=4,5,6,7 trtllm-serve meta-llama/Meta-Llama-3-70B --tp_size 4 \
  --max_seq_len 1280 --max_batch_size 2048 --max_num_tokens 8192 --host 0.0.0.0 --port 8001 \
  --extra_llm_api_options replica1.yaml

# replica 2, server on node1, chips 0-3
cat > replica2.yaml <<'END_OF_FILE'
dtype: bfloat16
enable_chunked_prefill: true
kv_cache_config:
  dtype: auto
  free_gpu_memory_fraction: 0.8565
  tokens_per_block: 32
END_OF_FILE
CUDA_VISIBLE_DEVICES=0,1,2,3 trtllm-serve meta-llama/Meta-Llama-3-70B --tp_size 4 \
  --max_seq_len 1280 --max_batch_size 2048 --max_num_tokens 8192 --host 0.0.0.0 --port 8002 \
  --extra_llm_api_options replica2.yaml
