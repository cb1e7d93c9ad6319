// plan_tables: the enumerations, schemes and instructions of this library as text, which tables.py parses.
#include <torch/csrc/stable/library.h>

#include <string>

#include "attention/paged_attention.h"

namespace armllm {
namespace {

constexpr char kTables[] =
#define ENUMERATOR(type, name, number) "enum " #type " " #name " " #number "\n"
#define DTYPE(name, number, torch_name) ENUMERATOR(ElementType, torch_name, number)
#define INDEX_TYPE(name, number, torch_name) ENUMERATOR(ElementType, torch_name, number)
#define ACTIVATION(name, number) ENUMERATOR(Activation, name, number)
#define SCORING(name, number) ENUMERATOR(Scoring, name, number)
#define ROPE_PAIRS(name, number) ENUMERATOR(RopePairs, name, number)
#define SPACE(name, number) ENUMERATOR(Space, name, number)
#define POINTWISE(name, number) ENUMERATOR(PointwiseOp, name, number)
#include "runtime/enums.def"
#define SCHEME(name, number, bits, span, type, offsets, least, largest, least_zero, largest_zero, computed) \
  ENUMERATOR(Scheme, name, number)                                                                          \
  "scheme " #name " " #bits " " #span " " #type " " #offsets " " #least " " #largest " " #least_zero        \
  " " #largest_zero " " #computed "\n"
#include "linear/schemes.def"
#undef ENUMERATOR
#define INSTRUCTION(opcode, fields) "instruction " #opcode "\n" fields
#define RECORD(name, fields) "record " #name "\n" fields
#define VIEW(name) "field " #name " view\n"
#define INT(name) "field " #name " int\n"
#define FLAG(name) "field " #name " flag\n"
#define REAL(name) "field " #name " real\n"
#define ENUM(name, type) "field " #name " enum " #type "\n"
#define PART(name, opcode) "field " #name " part " #opcode "\n"
#define LIST(name, record) "field " #name " list " #record "\n"
#include "plan/instructions.def"
    ;

std::string plan_tables() { return kTables; }

}  // namespace
}  // namespace armllm

STABLE_TORCH_LIBRARY_IMPL(armllm, CompositeExplicitAutograd, m) {
  m.impl("plan_tables", TORCH_BOX(&armllm::plan_tables));
}
