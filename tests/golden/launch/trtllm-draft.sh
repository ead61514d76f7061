# llama3.1-70b TP4 on 4 chips of h100-sxm: trtllm 1.3, flags as in its documentation of main
# (0434755).
# * The memory fraction is KV's share of what is free once all else is loaded; with it 0.9 of the
#   chip is in use, as planned.

# server on node0, chips 0-3
cat > replica0.yaml <<'END_OF_FILE'
dtype: bfloat16
enable_chunked_prefill: true
kv_cache_config:
  dtype: auto
  free_gpu_memory_fraction: 0.8543
  tokens_per_block: 32
disable_overlap_scheduler: true
speculative_config:
  decoding_type: DraftTarget
  max_draft_len: 3
  speculative_model_dir: meta-llama/Llama-3.2-1B
END_OF_FILE
CUDA_VISIBLE_DEVICES=0,1,2,3 trtllm-serve meta-llama/Llama-3.1-70B --tp_size 4 --max_seq_len 1280 \
  --max_batch_size 2048 --max_num_tokens 8192 --host 0.0.0.0 --port 8000 \
  --extra_llm_api_options replica0.yaml
