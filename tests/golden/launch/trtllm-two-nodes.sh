# llama3-70b TP8xPP2 on 16 chips of h100-sxm: trtllm 1.3, flags as in its documentation of main
# (0434755).
# * A replica spans nodes: one MPI job of all ranks under Slurm, started once.
# * node0 and node1 stand for the addresses of the nodes (--hosts).
# * The memory fraction is KV's share of what is free once all else is loaded; with it 0.9 of the
#   chip is in use, as planned.
# * The file that a server reads must be there on each of its nodes: a shared folder.
# * A server runs until it is stopped: give each command a shell of its own, on the node named above
#   it.

# server on node0, chips 0-7 of each node
cat > replica0.yaml <<'END_OF_FILE'
dtype: bfloat16
enable_chunked_prefill: true
kv_cache_config:
  dtype: auto
  free_gpu_memory_fraction: 0.9103
  tokens_per_block: 32
END_OF_FILE
srun -N 2 -w node0,node1 --ntasks 16 --ntasks-per-node=8 --mpi=pmix --gres=gpu:8 \
  trtllm-llmapi-launch trtllm-serve meta-llama/Meta-Llama-3-70B --tp_size 8 --pp_size 2 \
  --max_seq_len 1280 --max_batch_size 2048 --max_num_tokens 8192 --host 0.0.0.0 --port 8000 \
  --extra_llm_api_options replica0.yaml
