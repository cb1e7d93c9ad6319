// All op schemas of namespace `armllm`.  Implementations are registered next to their kernels.
#include <torch/csrc/stable/library.h>

// clang-format off: one schema per line
STABLE_TORCH_LIBRARY(armllm, m) {
  // linear
  m.def("int4_linear(Tensor x, Tensor weight, int out_features, str scheme, Tensor? bias=None, Tensor? residual=None, int digits=1, bool rotated=False) -> Tensor");
  m.def("int8_linear(Tensor x, Tensor weight, int out_features, Tensor? bias=None, Tensor? residual=None, int digits=1, bool rotated=False) -> Tensor");
  m.def("int4_gated_linear(Tensor x, Tensor weight, int out_features, str scheme, str activation, Tensor? gate_bias=None, Tensor? up_bias=None, int digits=1, bool rotated=False) -> Tensor");
  // the next two: activations are already quantized, as rms_norm_int8 returns them; the scheme may also be i8
  m.def("int4_linear_q(Tensor q, Tensor scales, Tensor weight, int out_features, str scheme, str dtype, Tensor? bias=None, Tensor? residual=None) -> Tensor");
  m.def("int4_gated_linear_q(Tensor q, Tensor scales, Tensor weight, int out_features, str scheme, str activation, str dtype, Tensor? gate_bias=None, Tensor? up_bias=None) -> Tensor");
  m.def("dense_linear(Tensor x, Tensor weight, Tensor? bias=None, bool wide=False) -> Tensor");
  // the next two: each head has its own weight; x (T, heads, K), weight (heads, panels, bytes) or (heads, N, K)
  m.def("int8_heads_linear(Tensor x, Tensor weight, int out_features) -> Tensor");
  m.def("dense_heads_linear(Tensor x, Tensor weight) -> Tensor");
  // packing: q is int8 (N, K), in -8..7, or in 0..15 with zero points.  multipliers (g32i) are uint8 (N, G) in
  // 1..16.  scales are f32 or bf16, zeros are uint8 in 0..15; both are (N), or (N, S) for float groups.  The
  // zeros of g32iz are (N, G) in 6..9.
  m.def("pack_int4(Tensor q, Tensor? multipliers, Tensor scales, str scheme, Tensor? zeros=None, "
        "Tensor? offsets=None) -> Tensor");
  m.def("pack_int8(Tensor q, Tensor scales) -> Tensor");
  m.def("panel_sections(str scheme, int in_features) -> int[]");
  m.def("unpack_weight(Tensor weight, int out_features, int in_features, str scheme) -> Tensor");
  m.def("search_steps(Tensor values, Tensor steps, Tensor zeros, Tensor? factors, int lowest, int highest) -> Tensor");
  // moe
  m.def("int4_moe(Tensor x, Tensor expert_ids, Tensor expert_weights, Tensor gate_up, Tensor down, int intermediate, str scheme, str activation, float limit=7.0, Tensor? gate_up_bias=None, Tensor? down_bias=None, bool gated=True, bool weigh_input=False, int identity_experts=0, float up_limit=7.0, bool rotated=False, int communicator=0, int[] inner_columns=[], int[] outer_columns=[], int[] rank_experts=[]) -> Tensor");
  m.def("int4_moe_lora(Tensor x, Tensor expert_ids, Tensor expert_weights, Tensor gate_up, Tensor down, int intermediate, str scheme, str activation, Tensor inner_a, Tensor inner_b, Tensor inner_ranks, Tensor outer_a, Tensor outer_b, Tensor outer_ranks, Tensor adapters, float limit=7.0, Tensor? gate_up_bias=None, Tensor? down_bias=None, bool gated=True, int identity_experts=0, float up_limit=7.0, bool rotated=False) -> Tensor");
  m.def("moe_route(Tensor logits, int top_k, str scoring, bool renormalize, float scale=1.0, Tensor? correction_bias=None, int groups=1, int top_k_groups=1, float epsilon=1e-20, Tensor? token_ids=None, Tensor? choices=None) -> (Tensor, Tensor)");
  // experts in files: gate_up and down of each layer, and of each of them a file's index and the first byte;
  // counts are hits, misses, bytes read, nanoseconds waited, bytes resident and the budget
  m.def("experts_open(int budget, str[] files, Tensor[] weights, int[] positions) -> int");
  m.def("experts_require(int store, int layer, int[] experts) -> ()");
  m.def("experts_counts(int store) -> int[]");
  m.def("experts_resident(int store) -> int[]");
  // norm
  m.def("rms_norm(Tensor x, Tensor weight, float eps, float weight_offset=0.0) -> Tensor");
  m.def("add_rms_norm(Tensor x, Tensor residual, Tensor weight, float eps, float weight_offset=0.0) -> (Tensor, Tensor)");
  m.def("rms_norm_int8(Tensor x, Tensor weight, float eps, float weight_offset=0.0, Tensor? residual=None) -> (Tensor, Tensor, Tensor)");
  m.def("layer_norm(Tensor x, Tensor? weight, Tensor? bias, float eps) -> Tensor");
  m.def("add_layer_norm(Tensor x, Tensor residual, Tensor? weight, Tensor? bias, float eps) -> (Tensor, Tensor)");
  // rope
  m.def("rope_table(Tensor positions, Tensor inv_freq, float scaling=1.0, int offset=0, Tensor? axes=None) -> (Tensor, Tensor)");
  m.def("rope_(Tensor(a!) q, Tensor(b!) k, Tensor cos, Tensor sin, bool interleaved=False, bool unzip=False) -> ()");
  // embedding
  m.def("split_embedding(Tensor ids, Tensor weight, Tensor rest, str dtype, str scheme=\"i8\", bool rotated=False) -> Tensor");
  // lora: low-rank additions to the result of a linear layer or an embedding, by row
  m.def("lora_linear(Tensor base, Tensor x, Tensor a, Tensor b, Tensor ranks, Tensor adapters) -> Tensor");
  m.def("lora_embedding(Tensor base, Tensor ids, Tensor a, Tensor b, Tensor ranks, Tensor adapters) -> Tensor");
  // activation
  m.def("gated_act(Tensor gate, Tensor up, str activation) -> Tensor");
  // attention
  m.def("kv_write(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor slots, Tensor(c!)? k_scales=None, Tensor(d!)? v_scales=None) -> ()");
  m.def("paged_attention(Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_table, Tensor query_start, Tensor seq_lens, int max_seq_len, float scale, int window=0, float softcap=0.0, Tensor? sinks=None, Tensor? k_scales=None, Tensor? v_scales=None, Tensor? alibi_slopes=None, Tensor? relative=None, Tensor? profiles=None, int ahead=0, Tensor? biases=None, Tensor? later=None, int group_size=0, int skipped_heads=0) -> Tensor");
  // latent attention: cache (blocks, block size, rank + rope size)
  m.def("mla_write(Tensor latent, Tensor k_rope, Tensor(a!) cache, Tensor slots) -> ()");
  m.def("mla_attention(Tensor q_latent, Tensor q_rope, Tensor cache, Tensor block_table, Tensor query_start, Tensor seq_lens, int max_seq_len, float scale, Tensor? sinks=None, Tensor? selected=None, int window=0) -> Tensor");
  // selection: of each token, int32 (T, top_k) positions in ascending order, then -1
  m.def("select_tokens(Tensor q, Tensor weights, Tensor keys, Tensor block_table, Tensor query_start, Tensor seq_lens, int max_seq_len, float scale, int top_k) -> Tensor");
  // selection of blocks: of each token and head, int32 (T, heads, top_k) blocks in ascending order, then -1
  m.def("select_blocks(Tensor q, Tensor keys, Tensor block_table, Tensor query_start, Tensor seq_lens, int max_seq_len, int span, int top_k, int nearest) -> Tensor");
  m.def("block_attention(Tensor q, Tensor k_cache, Tensor v_cache, Tensor chosen, int span, Tensor block_table, Tensor query_start, Tensor seq_lens, int max_seq_len, float scale, Tensor? k_scales=None, Tensor? v_scales=None) -> Tensor");
  // compressed entries: one of each window of tokens, in the block of its last one
  m.def("compress_windows(Tensor kv, Tensor gate, Tensor bias, Tensor weight, Tensor cos, Tensor sin, Tensor(a!) state, Tensor(b!) entries, Tensor block_table, Tensor state_slots, Tensor query_start, Tensor seq_lens, int block_size, float eps, Tensor? save_slots=None) -> ()");
  m.def("select_entries(Tensor q, Tensor weights, Tensor keys, Tensor block_table, Tensor query_start, Tensor seq_lens, int max_seq_len, int block_size, int rate, float scale, int top_k) -> Tensor");
  m.def("entry_attention(Tensor q, Tensor cache, Tensor? entries, Tensor block_table, Tensor query_start, Tensor seq_lens, int max_seq_len, float scale, int window, int rate=0, Tensor? sinks=None, Tensor? selected=None) -> Tensor");
  // recurrent: a state of each sequence
  m.def("causal_conv(Tensor x, Tensor weight, Tensor? bias, Tensor(a!) state, Tensor state_slots, Tensor query_start, Tensor seq_lens, bool silu=False, Tensor? save_slots=None) -> Tensor");
  m.def("gated_delta_rule(Tensor q, Tensor k, Tensor v, Tensor gate, Tensor beta, Tensor(a!) state, Tensor state_slots, Tensor query_start, Tensor seq_lens, float scale, bool normalize=False, bool delta=True, Tensor? save_slots=None) -> Tensor");
  m.def("selective_scan(Tensor x, Tensor dt, Tensor a, Tensor? b, Tensor? c, Tensor(a!) state, Tensor state_slots, Tensor query_start, Tensor seq_lens, bool normalize=False, Tensor? save_slots=None) -> Tensor");
  // sample: temperature, top_p, min_p and the penalties are f32 (rows); top_k, seeds and steps are int64
  // (rows); token lists are ids and offsets
  m.def("sample(Tensor logits, Tensor temperature, Tensor top_k, Tensor top_p, Tensor min_p, Tensor seeds, Tensor steps, Tensor? repetition_penalty=None, Tensor? presence_penalty=None, Tensor? frequency_penalty=None, Tensor? prompt_ids=None, Tensor? prompt_offsets=None, Tensor? output_ids=None, Tensor? output_offsets=None, bool logprobs=False) -> (Tensor, Tensor)");
  m.def("sample_probabilities(Tensor logits, Tensor temperature, Tensor top_k, Tensor top_p, Tensor min_p, Tensor? repetition_penalty=None, Tensor? presence_penalty=None, Tensor? frequency_penalty=None, Tensor? prompt_ids=None, Tensor? prompt_offsets=None, Tensor? output_ids=None, Tensor? output_offsets=None) -> Tensor");
  m.def("best_tokens(Tensor logits) -> Tensor");
  m.def("top_logprobs(Tensor logits, Tensor ids, int count) -> (Tensor, Tensor, Tensor, Tensor)");
  // collective: columns of all tensor parallel ranks; `memory` is shared by them
  m.def("communicator_open(Tensor memory, int rank, int ranks, int buffer_bytes, int timeout_ms, int[] sockets=[]) -> int");
  m.def("communicator_close(int communicator) -> ()");
  m.def("gather_columns(Tensor x, int communicator, int[] columns) -> Tensor");
  // machine
  m.def("isa_select(str name) -> str");
  m.def("isa_list() -> str");
  m.def("team_threads() -> int[]");
  // plan
  m.def("plan_tables() -> str");
  m.def("plan_create(Tensor[] constants, int[] program, float[] floats) -> int");
  m.def("plan_run(int plan, Tensor[] inputs, int tokens) -> Tensor[]");
  m.def("plan_run_then(int plan, int next, Tensor[] inputs, Tensor(a!)[] results, int tokens) -> int");
  m.def("plan_profile(int plan, Tensor[] inputs, int tokens) -> Tensor");
  m.def("plan_free(int plan) -> ()");
}
