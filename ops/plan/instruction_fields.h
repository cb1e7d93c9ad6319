// Opcodes, and one struct per opcode with the instruction's fields, generated from instructions.def.
#pragma once

#include <cstdint>

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
#define VIEW(name) View name;
#define INT(name) int64_t name;
#define FLAG(name) bool name;
#define REAL(name) float name;
#define ENUM(name, type) type name;
#define PART(name, opcode) opcode name;
#include "plan/instructions.def"
}  // namespace fields

#define INSTRUCTION(opcode, statements) \
  inline void read(Reader& reader, fields::opcode& to) { statements }
#define VIEW(name) to.name = reader.view();
#define INT(name) to.name = reader.integer();
#define FLAG(name) to.name = reader.integer() != 0;
#define REAL(name) to.name = reader.real();
#define ENUM(name, type) to.name = static_cast<type>(reader.integer());
#define PART(name, opcode) read(reader, to.name);
#include "plan/instructions.def"

}  // namespace armllm
