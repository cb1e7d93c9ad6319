// One op, one shape, run between the marks that the counter looks for.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <stdexcept>
#include <string>

#include "torch_shim.h"

namespace bench {

// `key=value` arguments of the command line.
class Options {
 public:
  Options(int count, char** arguments);
  int64_t number(const std::string& key, int64_t fallback) const;
  std::string word(const std::string& key, const std::string& fallback) const;
  torch_shim::ScalarType type(const std::string& key, const std::string& fallback) const;
  // Throws for a key that nothing asked for: a misspelt one would measure something else.
  void all_used() const;

 private:
  std::map<std::string, std::string> values_;
  mutable std::map<std::string, bool> used_;
};

using Body = std::function<void()>;
using Around = std::function<void(const Body&)>;

// What a case runs, and what it is worth: multiply-accumulates that a user asked for, or elements.
struct Case {
  std::function<void(const Around&)> run;
  double macs = 0, elements = 0;
};

inline Case case_of(const torch_shim::Call& call, double macs, double elements) {
  return {[call](const Around& around) { call.run(around); }, macs, elements};
}

// Finite values of about unit size, the same each time.
torch_shim::Tensor values(const std::vector<int64_t>& sizes, torch_shim::ScalarType type);
// A vector of int32.
torch_shim::Tensor integers(const std::vector<int64_t>& sizes, const std::function<int64_t(int64_t)>& value,
                            torch_shim::ScalarType type = torch_shim::ScalarType::Int);

// Adds the operands of a step whose `queries` tokens end one sequence of `context`, in blocks of any order.
void add_paged_sequence(torch_shim::Call& call, int64_t queries, int64_t context, int64_t block);

Case linear_case(const std::string& op, const Options& options);
Case moe_case(const Options& options);
Case attention_case(const std::string& op, const Options& options);
bool is_recurrent(const std::string& op);
Case recurrent_case(const std::string& op, const Options& options);
bool is_sparse(const std::string& op);
Case sparse_case(const std::string& op, const Options& options);
Case row_case(const std::string& op, const Options& options);

}  // namespace bench
