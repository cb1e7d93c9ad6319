// The registered op selective_scan.
#include "dispatch/variants.h"
#include "recurrent/recurrent.h"
#include "recurrent/state_slots.h"

namespace armllm {
namespace {

// Checks that a projection of tokens to the states has the shape (tokens, states), and returns its rows.
Rows states_by_token(std::optional<Tensor>& t, int64_t tokens, int64_t states, const char* name) {
  if (!t) return {};
  STD_TORCH_CHECK(t->dim() == 2 && t->size(0) == tokens && t->size(1) == states, name,
                  " must have the shape (", tokens, ", ", states, "), not ", shape_of(*t));
  t = as_rows(*t);
  return rows_of(*t, name);
}

Tensor selective_scan(Tensor x, Tensor dt, Tensor a, std::optional<Tensor> b, std::optional<Tensor> c,
                      Tensor state, Tensor state_slots, Tensor query_start, Tensor seq_lens, bool normalize,
                      std::optional<Tensor> save_slots) {
  STD_TORCH_CHECK(x.dim() == 2, "x must have the shape (tokens, channels), not ", shape_of(x));
  SelectiveScan scan;
  SelectiveScanArgs& args = scan.args;
  args.tokens = x.size(0);
  args.channels = x.size(1);
  STD_TORCH_CHECK(shape_of(dt) == shape_of(x), "dt must have the shape of x, ", shape_of(x), ", not ",
                  shape_of(dt));
  STD_TORCH_CHECK(type_of(a) == ScalarType::Float && a.dim() == 2 && a.size(1) == args.channels &&
                      a.size(0) >= 1 && a.size(0) <= kMostStates,
                  "a must be float32 of shape (states, ", args.channels, ") with 1 to ", kMostStates,
                  " states, not of shape ", shape_of(a));
  args.states = a.size(0);
  args.normalize = normalize;
  STD_TORCH_CHECK(holds_states(state) && state.dim() == 3 && state.size(1) == args.states &&
                      state.size(2) == args.channels && state.is_contiguous(),
                  "state must be contiguous float32 or bfloat16 of shape (slots, ", args.states, ", ",
                  args.channels, "), not of shape ", shape_of(state));
  const StepTensors steps =
      check_steps(state_slots, query_start, seq_lens, save_slots, args.tokens, state.size(0));
  x = as_rows(x);
  dt = as_rows(dt);
  a = as_contiguous(a);
  Tensor out = new_tensor(x, {args.tokens, args.channels});
  args.x = rows_of(x, "x");
  args.dt = rows_of(dt, "dt");
  args.b = states_by_token(b, args.tokens, args.states, "b");
  args.c = states_by_token(c, args.tokens, args.states, "c");
  args.a = static_cast<const float*>(a.data_ptr());
  args.out = rows_of(out, "out");
  args.state = static_cast<char*>(state.data_ptr());
  args.state_type = dtype_of(state, "state");
  args.steps = steps.view;
  if (args.tokens > 0 && args.channels > 0) run(scan);
  return out;
}

}  // namespace

int64_t SelectiveScan::tiles(int) const {
  return args.steps.sequences * ceil_div(args.channels, kScanChannels);
}

void SelectiveScan::tile(int, int64_t index) {
  const int64_t parts = ceil_div(args.channels, kScanChannels), channel = index % parts * kScanChannels;
  const int64_t sequence = index / parts, first = args.steps.first(sequence);
  const auto place = [&](const Rows& rows, int64_t column) {
    return rows ? Rows{rows.at(first, column), rows.stride, rows.type} : Rows{};
  };
  ScanPart part;
  part.tokens = args.steps.tokens(sequence);
  if (part.tokens == 0) return;
  part.x = place(args.x, channel);
  part.dt = place(args.dt, channel);
  part.b = place(args.b, 0);
  part.c = place(args.c, 0);
  part.out = place(args.out, channel);
  part.a = args.a + channel;
  const int64_t size = size_of(args.state_type);
  part.state_type = args.state_type;
  part.slots = args.state + channel * size;
  part.slot_stride = args.states * args.channels;
  part.state = part.slots + args.steps.slots[sequence] * part.slot_stride * size;
  part.saves = args.steps.saves ? args.steps.saves + first : nullptr;
  part.stride = args.channels;
  part.states = args.states;
  const int64_t left = args.channels - channel;
  part.channels = static_cast<int>(left < kScanChannels ? left : kScanChannels);
  part.normalize = args.normalize;
  part.is_new = args.steps.is_new(sequence);
  variant().recurrent->scan(part);
}

}  // namespace armllm

STABLE_TORCH_LIBRARY_IMPL(armllm, CPU, m) { m.impl("selective_scan", TORCH_BOX(&armllm::selective_scan)); }
