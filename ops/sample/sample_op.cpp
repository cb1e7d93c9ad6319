// sample, sample_probabilities: check the arguments, allocate the output and run the task set.
#include <tuple>
#include <type_traits>
#include <vector>

#include "runtime/tensor_args.h"
#include "sample/sample.h"

namespace armllm {
namespace {

// One value per row; `held` keeps a contiguous copy alive, if needed.
template <typename T>
struct PerRow {
  Tensor held;
  const T* data = nullptr;

  PerRow(const Tensor& t, int64_t rows, const char* name) {
    constexpr bool whole = std::is_same_v<T, int64_t>;
    STD_TORCH_CHECK(type_of(t) == (whole ? ScalarType::Long : ScalarType::Float), name, " must be ",
                    whole ? "int64" : "float32");
    STD_TORCH_CHECK(t.dim() == 1 && t.numel() == rows, name, " must have one value for each of the ", rows,
                    " rows of logits; it has ", t.numel());
    held = as_contiguous(t);
    data = static_cast<const T*>(held.data_ptr());
  }
  PerRow(const std::optional<Tensor>& t, int64_t rows, const char* name) {
    if (t.has_value()) *this = PerRow(*t, rows, name);
  }

  void check(int64_t rows, T low, T high, const char* name) const {
    for (int64_t r = 0; data != nullptr && r < rows; ++r)
      STD_TORCH_CHECK(data[r] >= low && data[r] <= high, name, " of row ", r, " is ", data[r],
                      "; it must lie in ", low, " … ", high);
  }
};

struct Lists {
  Tensor ids, offsets;
  TokenLists view;

  Lists(const std::optional<Tensor>& given_ids, const std::optional<Tensor>& given_offsets, int64_t rows,
        int64_t vocab_size, const char* name) {
    STD_TORCH_CHECK(given_ids.has_value() == given_offsets.has_value(), name, "_ids and ", name,
                    "_offsets belong together: pass both or neither");
    if (!given_ids.has_value()) return;
    STD_TORCH_CHECK(type_of(*given_ids) == ScalarType::Long && given_ids->dim() == 1, name,
                    "_ids must be int64 with one dimension");
    STD_TORCH_CHECK(type_of(*given_offsets) == ScalarType::Long && given_offsets->dim() == 1 &&
                        given_offsets->numel() == rows + 1,
                    name, "_offsets must be int64 with ", rows + 1,
                    " values, one more than the rows of logits");
    ids = as_contiguous(*given_ids);
    offsets = as_contiguous(*given_offsets);
    view.ids = static_cast<const int64_t*>(ids.data_ptr());
    view.offsets = static_cast<const int64_t*>(offsets.data_ptr());
    STD_TORCH_CHECK(view.offsets[0] == 0 && view.offsets[rows] == ids.numel(), name,
                    "_offsets must begin with 0 and end with the ", ids.numel(), " tokens of ", name, "_ids");
    for (int64_t r = 0; r < rows; ++r)
      STD_TORCH_CHECK(view.offsets[r] <= view.offsets[r + 1] && view.offsets[r + 1] <= ids.numel(), name,
                      "_offsets must not decrease or exceed the number of tokens; row ", r, " ends at ",
                      view.offsets[r + 1]);
    for (int64_t i = 0; i < ids.numel(); ++i)
      STD_TORCH_CHECK(view.ids[i] >= 0 && view.ids[i] < vocab_size, name, "_ids holds token ", view.ids[i],
                      "; the vocabulary has ", vocab_size);
    if (view.ids == nullptr) view = TokenLists{};  // all lists are empty
  }
};

// The checked arguments of a call; keeps their tensors alive.
struct Call {
  Tensor logits;
  int64_t rows, vocab_size;
  PerRow<float> heat, mass, share, repeat, present, frequent;
  PerRow<int64_t> count;
  Lists prompt, output;
  Scratch scratch;
  Sample set;

  Call(const Tensor& given, const Tensor& temperature, const Tensor& top_k, const Tensor& top_p,
       const Tensor& min_p, const std::optional<Tensor>& repetition, const std::optional<Tensor>& presence,
       const std::optional<Tensor>& frequency, const std::optional<Tensor>& prompt_ids,
       const std::optional<Tensor>& prompt_offsets, const std::optional<Tensor>& output_ids,
       const std::optional<Tensor>& output_offsets)
      : logits(as_matrix(given)),
        rows(logits.size(0)),
        vocab_size(logits.size(1)),
        heat(temperature, rows, "temperature"),
        mass(top_p, rows, "top_p"),
        share(min_p, rows, "min_p"),
        repeat(repetition, rows, "repetition_penalty"),
        present(presence, rows, "presence_penalty"),
        frequent(frequency, rows, "frequency_penalty"),
        count(top_k, rows, "top_k"),
        prompt(prompt_ids, prompt_offsets, rows, vocab_size, "prompt"),
        output(output_ids, output_offsets, rows, vocab_size, "output"),
        scratch(Sample::scratch_bytes(rows, vocab_size)) {
    constexpr float kMost = 3.4e38f;
    heat.check(rows, 0.0f, kMost, "temperature");
    mass.check(rows, 0.0f, 1.0f, "top_p");
    share.check(rows, 0.0f, 1.0f, "min_p");
    repeat.check(rows, 1e-30f, kMost, "repetition_penalty");
    present.check(rows, -kMost, kMost, "presence_penalty");
    frequent.check(rows, -kMost, kMost, "frequency_penalty");
    SampleArgs& a = set.args;
    a.logits = rows_of(logits, "logits");
    a.rows = rows;
    a.vocab_size = vocab_size;
    a.temperature = heat.data;
    a.top_p = mass.data;
    a.min_p = share.data;
    a.repetition = repeat.data;
    a.presence = present.data;
    a.frequency = frequent.data;
    a.top_k = count.data;
    a.prompt = prompt.view;
    a.output = output.view;
    a.scratch = scratch.data();
  }

  static Tensor as_matrix(const Tensor& given) {
    STD_TORCH_CHECK(given.dim() == 2 && given.size(1) >= 1, "logits must have shape (rows, vocabulary)");
    return as_rows(given);
  }

  void run_and_check(const int64_t* ids) {
    if (rows == 0) return;
    run(set);
    for (int64_t r = 0; r < rows; ++r)
      STD_TORCH_CHECK(ids[r] >= 0, "logits of row ", r,
                      " hold no number above -inf, so no token can be chosen");
  }
};

std::tuple<Tensor, Tensor> sample(Tensor logits, Tensor temperature, Tensor top_k, Tensor top_p, Tensor min_p,
                                  Tensor seeds, Tensor steps, std::optional<Tensor> repetition,
                                  std::optional<Tensor> presence, std::optional<Tensor> frequency,
                                  std::optional<Tensor> prompt_ids, std::optional<Tensor> prompt_offsets,
                                  std::optional<Tensor> output_ids, std::optional<Tensor> output_offsets,
                                  bool logprobs) {
  Call call(logits, temperature, top_k, top_p, min_p, repetition, presence, frequency, prompt_ids,
            prompt_offsets, output_ids, output_offsets);
  const int64_t rows = call.rows;
  const PerRow<int64_t> seed(seeds, rows, "seeds"), step(steps, rows, "steps");
  Tensor ids = new_tensor(logits, std::vector<int64_t>{rows}, ScalarType::Long);
  Tensor shares = new_tensor(logits, std::vector<int64_t>{logprobs ? rows : 0}, ScalarType::Float);
  SampleArgs& a = call.set.args;
  a.seeds = seed.data;
  a.steps = step.data;
  a.ids = static_cast<int64_t*>(ids.data_ptr());
  a.logprobs = logprobs ? static_cast<float*>(shares.data_ptr()) : nullptr;
  call.run_and_check(a.ids);
  return {ids, shares};
}

Tensor sample_probabilities(Tensor logits, Tensor temperature, Tensor top_k, Tensor top_p, Tensor min_p,
                            std::optional<Tensor> repetition, std::optional<Tensor> presence,
                            std::optional<Tensor> frequency, std::optional<Tensor> prompt_ids,
                            std::optional<Tensor> prompt_offsets, std::optional<Tensor> output_ids,
                            std::optional<Tensor> output_offsets) {
  Call call(logits, temperature, top_k, top_p, min_p, repetition, presence, frequency, prompt_ids,
            prompt_offsets, output_ids, output_offsets);
  Tensor found =
      torch::stable::new_zeros(logits, std::vector<int64_t>{call.rows, call.vocab_size}, ScalarType::Float);
  std::vector<int64_t> ids(call.rows);
  call.set.args.ids = ids.data();
  call.set.args.probabilities = static_cast<float*>(found.data_ptr());
  call.run_and_check(ids.data());
  return found;
}

}  // namespace
}  // namespace armllm

STABLE_TORCH_LIBRARY_IMPL(armllm, CPU, m) {
  m.impl("sample", TORCH_BOX(&armllm::sample));
  m.impl("sample_probabilities", TORCH_BOX(&armllm::sample_probabilities));
}
