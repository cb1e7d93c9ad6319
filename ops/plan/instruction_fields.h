// Opcodes, and one struct per opcode with the instruction's fields, generated from instructions.def.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "attention/paged_attention.h"
#include "linear/packed_panel.h"
#include "moe/moe.h"
#include "plan/plan.h"
#include "rope/rope.h"
#include "runtime/types.h"

namespace armllm {

enum class Opcode : int64_t {
#define INSTRUCTION(opcode, fields) opcode,
#include "plan/instructions.def"
};

namespace fields {
#define INSTRUCTION(opcode, members) \
  struct opcode {                    \
    members                          \
  };
#define RECORD(name, members) INSTRUCTION(name, members)
#define VIEW(name) View name;
#define INT(name) int64_t name;
#define FLAG(name) bool name;
#define REAL(name) float name;
#define ENUM(name, type) type name;
#define PART(name, opcode) opcode name;
#define LIST(name, record) std::vector<record> name;
#include "plan/instructions.def"
}  // namespace fields

class Checks;
// Throws if an instruction reads or writes outside of its plan's memory (program_checks.cpp and, for those
// that use a cache, cache_checks.cpp).
#define INSTRUCTION(opcode, members) void check_fields(const Checks& c, const fields::opcode& op);
#include "plan/instructions.def"

// The scales of a cache that has none are input −1.
constexpr int64_t least_of(std::string_view name) {
  return name == "k_scales" || name == "v_scales" ? -1 : 0;
}

inline bool is_enumerator(Activation, int64_t number) {
#define ACTIVATION(name, value) \
  if (number == value) return true;
#include "runtime/enums.def"
  return false;
}
inline bool is_enumerator(Scoring, int64_t number) {
#define SCORING(name, value) \
  if (number == value) return true;
#include "runtime/enums.def"
  return false;
}
inline bool is_enumerator(RopePairs, int64_t number) {
#define ROPE_PAIRS(name, value) \
  if (number == value) return true;
#include "runtime/enums.def"
  return false;
}
inline bool is_enumerator(PointwiseOp, int64_t number) {
#define POINTWISE(name, value) \
  if (number == value) return true;
#include "runtime/enums.def"
  return false;
}
inline bool is_enumerator(Scheme, int64_t number) {
#define SCHEME(name, value, ...) \
  if (number == value) return true;
#include "linear/schemes.def"
  return false;
}

template <class Enum>
Enum enumerator(int64_t number) {
  STD_TORCH_CHECK(is_enumerator(Enum{}, number), "plan: ", number, " is the number of no enumerator");
  return static_cast<Enum>(number);
}

#define INSTRUCTION(opcode, statements) \
  inline void read(Reader& reader, fields::opcode& to) { statements }
#define RECORD(name, statements) INSTRUCTION(name, statements)
#define VIEW(name) to.name = reader.view();
#define INT(name) to.name = reader.number(#name, least_of(#name));
#define FLAG(name) to.name = reader.integer() != 0;
#define REAL(name) to.name = reader.real();
#define ENUM(name, type) to.name = enumerator<type>(reader.integer());
#define PART(name, opcode) read(reader, to.name);
#define LIST(name, record)                 \
  to.name.resize(reader.list_size(#name)); \
  for (fields::record& item : to.name) read(reader, item);
#include "plan/instructions.def"

}  // namespace armllm
