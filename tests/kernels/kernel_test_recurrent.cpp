// Recurrent layers: convolutions, the delta rule and scans against the scalar kernels, and in chunks of
// tokens against one call.
#include "kernel_test.h"
#include "recurrent/recurrent.h"

namespace armllm_test {
namespace {

using namespace armllm;

constexpr DType kStateTypes[] = {DType::f32, DType::bf16};

char* at(Values& values, int64_t i) { return static_cast<char*>(values.data()) + i * size_of(values.type()); }
float* floats(Values& values, int64_t i = 0) { return reinterpret_cast<float*>(at(values, i)); }

void test_convolve(const RecurrentKernels& tested, const RecurrentKernels& truth, const char* name,
                   Report& report) {
  Random random(61);
  for (DType type : kTypes)
    for (int64_t channels : {1, 16, 29, 70})
      for (int64_t taps = 1; taps <= kMostTaps; ++taps)
        for (int kind = 0; kind < 3; ++kind) {
          constexpr int64_t tokens = 3;
          Values x(type, (tokens + taps - 1) * channels, random), weight(DType::f32, taps * channels, random),
              bias(DType::f32, channels, random);
          if (kind == 1) x.set(channels / 2, std::nanf("")), x.set(0, INFINITY);
          Values out[2] = {Values(type, tokens * channels), Values(type, tokens * channels)};
          std::vector<const char*> rows;
          for (int64_t i = 0; i < tokens + taps - 1; ++i)  // a new sequence has no rows before its own
            rows.push_back(kind == 2 && i < taps - 1 ? nullptr : at(x, i * channels));
          for (int i = 0; i < 2; ++i) {
            ConvPart part;
            part.rows = rows.data();
            part.out = at(out[i], 0);
            part.out_stride = part.channels = part.weight_stride = channels;
            part.tokens = tokens;
            part.weight = floats(weight);
            part.bias = kind == 2 ? nullptr : floats(bias);
            part.taps = taps;
            part.type = type;
            part.silu = kind != 0;
            (i ? truth : tested).convolve(part);
          }
          report.expect(out[0].same(out[1]), text("%s convolve type %d channels %ld taps %ld kind %d", name,
                                                  int(type), long(channels), long(taps), kind));
        }
}

void test_prepare(const RecurrentKernels& tested, const RecurrentKernels& truth, const char* name,
                  Report& report) {
  Random random(62);
  for (DType type : kTypes)
    for (int64_t size : {1, 16, 29, 128})
      for (bool normalize : {false, true}) {
        Values q(type, 2 * size, random), k(type, 2 * size, random), gate(type, size, random);
        gate.set(size / 2, -INFINITY);
        Values out[2] = {Values(DType::f32, 3 * size + 1), Values(DType::f32, 3 * size + 1)};
        for (int i = 0; i < 2; ++i) {
          const RecurrentKernels& kernels = i ? truth : tested;
          DeltaRuleArgs args;
          args.q = q.rows(2 * size);
          args.k = k.rows(2 * size);
          args.key_size = size;
          args.normalize = normalize;
          args.scale = 0.3f;
          kernels.prepare(args, 0, 1, floats(out[i]), floats(out[i], size), floats(out[i], 3 * size));
          kernels.decay(gate.data(), type, size, floats(out[i], 2 * size));
        }
        report.expect(out[0].same(out[1]), text("%s prepare type %d size %ld normalize %d", name, int(type),
                                                long(size), int(normalize)));
      }
}

// One head of a sequence, and the states that its tokens leave: slot 0 is its own, slot 1 a saved one.
struct Head {
  int64_t tokens, key_size, value_size;
  bool per_channel, delta, is_new;
  Values prepared, decay, beta, v, out, state;
  std::vector<int64_t> saves;

  Head(int64_t token_count, int64_t keys, int64_t values, DType type, DType state_type, int kind,
       Random& random)
      : tokens(token_count),
        key_size(keys),
        value_size(values),
        per_channel(kind & 1),
        delta(kind & 2),
        is_new(kind & 4),
        prepared(DType::f32, tokens * (2 * keys + 1), random, 0.5f),
        decay(DType::f32, tokens * (per_channel ? keys : 1)),
        beta(type, tokens, random, 1.0f),
        v(type, tokens * values, random),
        out(type, tokens * values),
        state(state_type, 2 * keys * values, random),
        saves(size_t(tokens), -1) {
    for (int64_t i = 0; i < tokens * (per_channel ? keys : 1); ++i) decay.set(i, random.uniform(0.2f, 1.0f));
    if (tokens > 1) saves[1] = 1;
  }

  // Tokens `from` … `from + count − 1`, all columns.
  void run(const RecurrentKernels& kernels, int64_t from, int64_t count) {
    for (int64_t column = 0; column < value_size; column += kernels.delta_columns) {
      DeltaPart part;
      part.q = floats(prepared, from * (2 * key_size + 1));
      part.k = part.q + key_size;
      part.qk = part.k + key_size;
      part.key_stride = 2 * key_size + 1;
      part.decay_stride = per_channel ? key_size : 1;
      part.decay = floats(decay, from * part.decay_stride);
      part.beta = at(beta, from);
      part.v = at(v, from * value_size + column);
      part.out = at(out, from * value_size + column);
      part.type = part.beta_type = v.type();
      part.beta_stride = size_of(v.type());
      part.v_stride = part.out_stride = value_size * size_of(v.type());
      part.state_type = state.type();
      part.state = part.slots = at(state, column);
      part.slot_stride = key_size * value_size;
      part.saves = saves.data() + from;
      part.tokens = count;
      part.key_size = key_size;
      part.value_size = value_size;
      part.columns = std::min(kernels.delta_columns, value_size - column);
      part.decay_per_channel = per_channel;
      part.delta = delta;
      part.is_new = is_new && from == 0;
      kernels.delta_rule(part);
    }
  }
  bool same(const Head& other) const { return out.same(other.out) && state.same(other.state); }
};

void test_delta_rule(const RecurrentKernels& tested, const RecurrentKernels& truth, const char* name,
                     Report& report) {
  Random random(63);
  for (DType type : kTypes)
    for (DType state_type : kStateTypes)
      for (int64_t key_size : {1, 17, 64})
        for (int64_t value_size : {1, 16, 31, 32, 70})
          for (int kind = 0; kind < 8; ++kind) {
            constexpr int64_t tokens = 5;
            Head whole(tokens, key_size, value_size, type, state_type, kind, random);
            if (kind == 7) whole.v.set(0, std::nanf("")), whole.v.set(value_size - 1, INFINITY);
            Head other = whole, parts = whole;
            whole.run(tested, 0, tokens);
            other.run(truth, 0, tokens);
            for (int64_t from = 0; from < tokens;) {
              const int64_t count = 1 + random.below(tokens - from);
              parts.run(tested, from, count);
              from += count;
            }
            const std::string what = text("types %d %d keys %ld values %ld kind %d", int(type),
                                          int(state_type), long(key_size), long(value_size), kind);
            report.expect(whole.same(other), text("%s delta rule %s", name, what.c_str()));
            report.expect(whole.same(parts), text("%s delta rule in chunks %s", name, what.c_str()));
          }
}

// Channels of a sequence and their states, as above.
struct Channels {
  int64_t tokens, states, channels;
  int kind;
  Values x, dt, a, b, c, out, state;
  std::vector<int64_t> saves;

  Channels(int64_t token_count, int64_t state_count, int64_t count, DType type, DType state_type, int which,
           Random& random)
      : tokens(token_count),
        states(state_count),
        channels(count),
        kind(which),
        x(type, tokens * count, random),
        dt(type, tokens * count),
        a(DType::f32, states * count),
        b(type, tokens * states, random),
        c(type, tokens * states, random),
        out(type, tokens * count),
        state(state_type, 2 * states * count, random),
        saves(size_t(tokens), -1) {
    for (int64_t i = 0; i < tokens * count; ++i) dt.set(i, random.uniform(0.05f, 1.0f));
    for (int64_t i = 0; i < states * count; ++i) a.set(i, random.uniform(-2.0f, -0.1f));
    saves[0] = 1;
  }

  void run(const RecurrentKernels& kernels, int64_t from, int64_t count) {
    const auto rows = [&](Values& values, int64_t width) {
      return Rows{at(values, from * width), width, values.type()};
    };
    ScanPart part;
    part.x = rows(x, channels);
    part.dt = rows(dt, channels);
    part.out = rows(out, channels);
    if (kind != 1) part.b = rows(b, states), part.c = rows(c, states);
    part.a = floats(a);
    part.state_type = state.type();
    part.state = part.slots = at(state, 0);
    part.slot_stride = states * channels;
    part.saves = saves.data() + from;
    part.stride = channels;
    part.tokens = count;
    part.states = states;
    part.channels = static_cast<int>(channels);
    part.is_new = kind == 2 && from == 0;
    part.normalize = kind == 1;
    kernels.scan(part);
  }
  bool same(const Channels& other) const { return out.same(other.out) && state.same(other.state); }
};

void test_scan(const RecurrentKernels& tested, const RecurrentKernels& truth, const char* name,
               Report& report) {
  Random random(64);
  for (DType type : kTypes)
    for (DType state_type : kStateTypes)
      for (int64_t states : {1, 2, 17, 64})
        for (int64_t channels : {int64_t(1), int64_t(7), kScanChannels})
          for (int kind = 0; kind < 4; ++kind) {
            constexpr int64_t tokens = 4;
            Channels whole(tokens, states, channels, type, state_type, kind, random);
            if (kind == 3) whole.x.set(0, std::nanf("")), whole.dt.set(channels - 1, INFINITY);
            Channels other = whole, parts = whole;
            whole.run(tested, 0, tokens);
            other.run(truth, 0, tokens);
            for (int64_t from = 0; from < tokens;) {
              const int64_t count = 1 + random.below(tokens - from);
              parts.run(tested, from, count);
              from += count;
            }
            const std::string what = text("types %d %d states %ld channels %ld kind %d", int(type),
                                          int(state_type), long(states), long(channels), kind);
            report.expect(whole.same(other), text("%s scan %s", name, what.c_str()));
            report.expect(whole.same(parts), text("%s scan in chunks %s", name, what.c_str()));
          }
}

}  // namespace

void test_recurrent(const Variant& tested, const Variant& truth, Report& report) {
  test_convolve(*tested.recurrent, *truth.recurrent, tested.name, report);
  test_prepare(*tested.recurrent, *truth.recurrent, tested.name, report);
  test_delta_rule(*tested.recurrent, *truth.recurrent, tested.name, report);
  test_scan(*tested.recurrent, *truth.recurrent, tested.name, report);
}

}  // namespace armllm_test
