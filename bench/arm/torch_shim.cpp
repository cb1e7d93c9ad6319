#include "torch_shim.h"

#include <cstdlib>
#include <cstring>
#include <memory>
#include <stdexcept>

// What the handles of the C interface point to.
struct AtenTensorOpaque {
  std::vector<int64_t> sizes, strides;
  int32_t type = 0;
  std::shared_ptr<char> data;

  int64_t elements() const {
    int64_t n = 1;
    for (int64_t size : sizes) n *= size;
    return n;
  }
};
struct StableListOpaque {
  std::vector<StableIValue> items;
};
struct StringOpaque {
  std::string text;
};

namespace torch_shim {
namespace {

int64_t type_size(int32_t type) {
  switch (ScalarType(type)) {
    case ScalarType::Byte:
    case ScalarType::Char:
    case ScalarType::Bool:
      return 1;
    case ScalarType::Short:
    case ScalarType::UInt16:
    case ScalarType::Half:
    case ScalarType::BFloat16:
      return 2;
    case ScalarType::Int:
    case ScalarType::Float:
      return 4;
    default:
      return 8;
  }
}

AtenTensorOpaque* allocate(const std::vector<int64_t>& sizes, int32_t type) {
  auto* tensor = new AtenTensorOpaque;
  tensor->sizes = sizes;
  tensor->type = type;
  tensor->strides.assign(sizes.size(), 1);
  for (size_t d = sizes.size(); d-- > 1;) tensor->strides[d - 1] = tensor->strides[d] * sizes[d];
  const size_t bytes = size_t(tensor->elements() * type_size(type) + 127) / 64 * 64;
  tensor->data.reset(static_cast<char*>(std::aligned_alloc(64, bytes)), std::free);
  return tensor;
}

bool is_contiguous(const AtenTensorOpaque& t) {
  int64_t stride = 1;
  for (size_t d = t.sizes.size(); d-- > 0; stride *= t.sizes[d])
    if (t.sizes[d] != 1 && t.strides[d] != stride) return false;
  return true;
}

std::map<std::string, Op>& ops() {
  static std::map<std::string, Op> registered;
  return registered;
}

std::string trimmed(const std::string& text) {
  const size_t first = text.find_first_not_of(' ');
  return first == std::string::npos ? "" : text.substr(first, text.find_last_not_of(' ') - first + 1);
}

std::vector<std::string> parts(const std::string& list) {
  std::vector<std::string> found;
  for (size_t at = 0; at < list.size();) {
    const size_t end = std::min(list.find(',', at), list.size());
    found.push_back(trimmed(list.substr(at, end - at)));
    at = end + 1;
  }
  return found;
}

// `name(type name=default, …) -> result`; an annotation such as (a!) belongs to the type.
void define(const std::string& schema) {
  const size_t open = schema.find('('), arrow = schema.rfind("->"), close = schema.rfind(')', arrow);
  Op& op = ops()[schema.substr(0, open)];
  for (const std::string& part : parts(schema.substr(open + 1, close - open - 1))) {
    if (part == "*") continue;
    const size_t equals = part.find('='), space = part.rfind(' ', equals);
    op.arguments.push_back({part.substr(0, space), part.substr(space + 1, equals - space - 1),
                            equals == std::string::npos ? "" : part.substr(equals + 1)});
  }
  const std::string result = trimmed(schema.substr(arrow + 2));
  op.outputs = result == "()" ? 0 : result[0] == '(' ? parts(result).size() : 1;
}

StableIValue fallback_of(const Argument& a, const std::string& op_name) {
  using torch::stable::detail::from;
  if (a.type.back() == '?') {
    if (a.fallback.empty() || a.fallback == "None") return from(std::nullopt);
  } else if (a.type == "int" && !a.fallback.empty()) {
    return from(int64_t(std::atoll(a.fallback.c_str())));
  } else if (a.type == "float" && !a.fallback.empty()) {
    return from(std::atof(a.fallback.c_str()));
  } else if (a.type == "bool" && !a.fallback.empty()) {
    return from(a.fallback == "True");
  } else if (a.type == "str" && a.fallback.size() >= 2) {
    return from(a.fallback.substr(1, a.fallback.size() - 2));
  }
  throw std::runtime_error(op_name + " needs a value for " + a.type + " " + a.name);
}

template <typename T>
T taken(StableIValue value) {
  return torch::stable::detail::to<T>(value);
}

[[noreturn]] void missing(const std::string& what) {
  std::fprintf(stderr, "torch_shim has no %s; add it where the ops need it\n", what.c_str());
  std::abort();
}

}  // namespace

const Op& op(const std::string& name) {
  const auto found = ops().find(name);
  if (found == ops().end() || found->second.kernel == nullptr)
    throw std::runtime_error("no op '" + name + "' is registered");
  return found->second;
}

bool has_argument(const std::string& op_name, const std::string& argument) {
  for (const Argument& a : op(op_name).arguments)
    if (a.name == argument) return true;
  return false;
}

Tensor zeros(const std::vector<int64_t>& sizes, ScalarType type) {
  AtenTensorOpaque* tensor = allocate(sizes, int32_t(type));
  std::memset(tensor->data.get(), 0, size_t(tensor->elements() * type_size(tensor->type)));
  return Tensor(tensor);
}

std::vector<StableIValue> Call::run(const std::function<void(const std::function<void()>&)>& around) const {
  const Op& called = op(name_);
  std::vector<StableIValue> stack;
  for (const Argument& a : called.arguments) {
    const auto maker = makers_.find(a.name);
    stack.push_back(maker == makers_.end() ? fallback_of(a, name_) : maker->second());
  }
  for (const auto& [name, maker] : makers_)
    if (!has_argument(name_, name)) throw std::runtime_error(name_ + " has no argument " + name);
  stack.resize(std::max<size_t>(stack.size(), called.outputs));
  around([&] { called.kernel(stack.data(), called.arguments.size(), called.outputs); });
  stack.resize(called.outputs);
  return stack;
}

}  // namespace torch_shim

using torch_shim::taken;

extern "C" {

#define DTYPE(name, type) \
  int32_t aoti_torch_dtype_##name() { return int32_t(torch_shim::ScalarType::type); }
DTYPE(uint8, Byte)
DTYPE(int8, Char)
DTYPE(int16, Short)
DTYPE(int32, Int)
DTYPE(int64, Long)
DTYPE(float16, Half)
DTYPE(float32, Float)
DTYPE(float64, Double)
DTYPE(bfloat16, BFloat16)
DTYPE(bool, Bool)
DTYPE(complex32, ComplexHalf)
DTYPE(complex64, ComplexFloat)
DTYPE(complex128, ComplexDouble)
DTYPE(float8_e5m2, Float8_e5m2)
DTYPE(float8_e4m3fn, Float8_e4m3fn)
DTYPE(float8_e5m2fnuz, Float8_e5m2fnuz)
DTYPE(float8_e4m3fnuz, Float8_e4m3fnuz)
DTYPE(uint16, UInt16)
DTYPE(uint32, UInt32)
DTYPE(uint64, UInt64)
#undef DTYPE

// Only told apart, never looked into.
#define CONSTANT(name, value) \
  int32_t aoti_torch_##name() { return value; }
CONSTANT(layout_strided, 0)
CONSTANT(layout_sparse_coo, 1)
CONSTANT(layout_sparse_csr, 2)
CONSTANT(layout_sparse_csc, 3)
CONSTANT(layout_sparse_bsr, 4)
CONSTANT(layout_sparse_bsc, 5)
CONSTANT(layout__mkldnn, 6)
CONSTANT(layout_jagged, 7)
CONSTANT(memory_format_contiguous_format, 0)
CONSTANT(memory_format_preserve_format, 1)
CONSTANT(memory_format_channels_last, 2)
CONSTANT(memory_format_channels_last_3d, 3)
CONSTANT(device_type_cpu, 0)
CONSTANT(device_type_cuda, 1)
CONSTANT(device_type_meta, 2)
CONSTANT(device_type_xpu, 3)
CONSTANT(device_type_mps, 4)
CONSTANT(device_type_privateuse1, 5)
#undef CONSTANT

uint64_t aoti_torch_abi_version() { return TORCH_ABI_VERSION; }

AOTITorchError aoti_torch_library_init_def(const char*, const char*, uint32_t, TorchLibraryHandle* handle) {
  *handle = nullptr;
  return 0;
}
AOTITorchError aoti_torch_library_init_impl(const char*, const char*, const char*, uint32_t,
                                            TorchLibraryHandle* handle) {
  *handle = nullptr;
  return 0;
}
AOTITorchError aoti_torch_library_init_fragment(const char*, const char*, uint32_t,
                                                TorchLibraryHandle* handle) {
  *handle = nullptr;
  return 0;
}
AOTITorchError aoti_torch_delete_library_object(TorchLibraryHandle) { return 0; }
AOTITorchError aoti_torch_library_def(TorchLibraryHandle, const char* schema) {
  torch_shim::define(schema);
  return 0;
}
AOTITorchError torch_library_impl(TorchLibraryHandle, const char* name,
                                  void (*kernel)(StableIValue*, uint64_t, uint64_t), uint64_t) {
  torch_shim::ops()[name].kernel = kernel;
  return 0;
}

AOTITorchError aoti_torch_new_uninitialized_tensor(AtenTensorHandle* handle) {
  *handle = new AtenTensorOpaque;
  return 0;
}
AOTITorchError aoti_torch_new_tensor_handle(AtenTensorHandle from, AtenTensorHandle* handle) {
  *handle = new AtenTensorOpaque(*from);
  return 0;
}
AOTITorchError aoti_torch_delete_tensor_object(AtenTensorHandle tensor) {
  delete tensor;
  return 0;
}
AOTITorchError aoti_torch_get_data_ptr(AtenTensorHandle t, void** data) {
  *data = t->data.get();
  return 0;
}
AOTITorchError torch_get_mutable_data_ptr(AtenTensorHandle t, void** data) {
  *data = t->data.get();
  return 0;
}
AOTITorchError torch_get_const_data_ptr(AtenTensorHandle t, const void** data) {
  *data = t->data.get();
  return 0;
}
AOTITorchError aoti_torch_get_dim(AtenTensorHandle t, int64_t* dim) {
  *dim = int64_t(t->sizes.size());
  return 0;
}
AOTITorchError aoti_torch_get_numel(AtenTensorHandle t, int64_t* numel) {
  *numel = t->elements();
  return 0;
}
AOTITorchError aoti_torch_get_sizes(AtenTensorHandle t, int64_t** sizes) {
  *sizes = t->sizes.data();
  return 0;
}
AOTITorchError aoti_torch_get_strides(AtenTensorHandle t, int64_t** strides) {
  *strides = t->strides.data();
  return 0;
}
AOTITorchError aoti_torch_get_size(AtenTensorHandle t, int64_t d, int64_t* size) {
  *size = t->sizes.at(size_t(d < 0 ? d + int64_t(t->sizes.size()) : d));
  return 0;
}
AOTITorchError aoti_torch_get_stride(AtenTensorHandle t, int64_t d, int64_t* stride) {
  *stride = t->strides.at(size_t(d < 0 ? d + int64_t(t->sizes.size()) : d));
  return 0;
}
AOTITorchError aoti_torch_get_dtype(AtenTensorHandle t, int32_t* type) {
  *type = t->type;
  return 0;
}
size_t aoti_torch_dtype_element_size(int32_t type) { return size_t(torch_shim::type_size(type)); }
AOTITorchError aoti_torch_get_device_type(AtenTensorHandle, int32_t* type) {
  *type = aoti_torch_device_type_cpu();
  return 0;
}
AOTITorchError aoti_torch_is_contiguous(AtenTensorHandle t, bool* contiguous) {
  *contiguous = torch_shim::is_contiguous(*t);
  return 0;
}
AOTITorchError aoti_torch_is_defined(AtenTensorHandle t, bool* defined) {
  *defined = t->data != nullptr;
  return 0;
}

AOTITorchError torch_new_list_reserve_size(size_t size, StableListHandle* list) {
  *list = new StableListOpaque;
  (*list)->items.reserve(size);
  return 0;
}
AOTITorchError torch_list_size(StableListHandle list, size_t* size) {
  *size = list->items.size();
  return 0;
}
AOTITorchError torch_list_get_item(StableListHandle list, size_t index, StableIValue* item) {
  *item = list->items.at(index);
  return 0;
}
AOTITorchError torch_list_set_item(StableListHandle list, size_t index, StableIValue item) {
  list->items.at(index) = item;
  return 0;
}
AOTITorchError torch_list_push_back(StableListHandle list, StableIValue item) {
  list->items.push_back(item);
  return 0;
}
AOTITorchError torch_delete_list(StableListHandle list) {
  delete list;
  return 0;
}
AOTITorchError torch_new_string_handle(const char* data, size_t length, StringHandle* handle) {
  *handle = new StringOpaque{std::string(data, length)};
  return 0;
}
AOTITorchError torch_delete_string(StringHandle handle) {
  delete handle;
  return 0;
}
AOTITorchError torch_string_length(StringHandle handle, size_t* length) {
  *length = handle->text.size();
  return 0;
}
AOTITorchError torch_string_c_str(StringHandle handle, const char** data) {
  *data = handle->text.c_str();
  return 0;
}

AOTITorchError torch_get_num_threads(uint32_t* threads) {
  *threads = 1;
  return 0;
}
AOTITorchError torch_get_thread_idx(uint32_t* index) {
  *index = 0;
  return 0;
}
AOTITorchError torch_parallel_for(int64_t begin, int64_t end, int64_t, ParallelFunc body, void* context) {
  if (begin < end) body(begin, end, context);
  return 0;
}

// The ops use few of torch's own operators, and the benchmarks only in forms that copy nothing.
AOTITorchError torch_call_dispatcher(const char* name, const char*, StableIValue* stack, uint64_t) {
  const std::string op = name;
  if (op == "aten::new_empty" || op == "aten::new_zeros") {
    const auto self = taken<torch::stable::Tensor>(stack[0]);
    const auto sizes = taken<std::vector<int64_t>>(stack[1]);
    const auto type = taken<std::optional<int32_t>>(stack[2]);
    AtenTensorOpaque* made = torch_shim::allocate(sizes, type.value_or(self.get()->type));
    if (op == "aten::new_zeros")
      std::memset(made->data.get(), 0, size_t(made->elements() * torch_shim::type_size(made->type)));
    stack[0] = torch::stable::detail::from(static_cast<AtenTensorHandle>(made));
    return 0;
  }
  if (op == "aten::contiguous") {
    if (!torch_shim::is_contiguous(*taken<AtenTensorHandle>(stack[0])))
      torch_shim::missing("copy by contiguous");
    return 0;  // the handle on the stack is the result
  }
  if (op == "aten::to") {
    const auto type = taken<std::optional<int32_t>>(stack[1]);
    if (type.has_value() && *type != taken<AtenTensorHandle>(stack[0])->type)
      torch_shim::missing("conversion by to");
    return 0;
  }
  torch_shim::missing(op);
}

}  // extern "C"
