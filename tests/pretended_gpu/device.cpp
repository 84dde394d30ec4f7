// A device for torch that lies in host memory and keeps the rules of a GPU; see run.py.
//
// - Tensors of it have storages, views, streams, events and a thread of autograd of their own, as on CUDA. Fresh memory is NaN.
// - Every operation runs on the CPU at once, on aliases of the same memory. Mixing it with CPU tensors is an error, as on CUDA.
// - Every stream has a vector clock. An operation that reads or writes what another stream writes, without having waited for it, is an
//   error; memory that is freed while another stream uses it is told by `late()`.
// - Where it is told that nothing may wait, what would stop a GPU's queue is an error.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/extension.h>

#include <map>
#include <mutex>
#include <set>
#include <unordered_map>

namespace {

constexpr auto KIND = c10::DeviceType::PrivateUse1;

int count_devices() {
  static int n = getenv("PRETENDED_GPUS") ? atoi(getenv("PRETENDED_GPUS")) : 8;
  return n;
}

// ---------------------------------------------------------------- streams and what they have seen

using Clock = std::map<int64_t, uint64_t>;   // stream -> the last of its operations that is known to be done

struct Access {
  int64_t stream;
  uint64_t tick;
  std::string op;
  size_t begin, end;   // bytes
  bool writes;
};

struct Memory {
  int64_t home;   // the stream it was allocated on
  size_t bytes;
  std::vector<Access> accesses;
  std::set<int64_t> recorded;   // by record_stream
};

std::mutex lock;
std::map<int64_t, Clock> clocks;
Clock host;
std::unordered_map<void*, Memory> memories;
std::vector<std::string> found_late;   // where nothing can be raised
size_t allocated = 0, peak = 0;
int64_t streams_made = 0;
bool may_wait = true;   // torch.cuda.set_sync_debug_mode("error") says no
thread_local int device_now = 0;
thread_local std::map<int, int64_t> stream_now;   // by device; 0 is the default one

int index_of(c10::Device device) { return device.index() < 0 ? device_now : device.index(); }
int64_t key_of(int device, int64_t stream) { return device * 1000000 + stream; }
int64_t key_of(const c10::Stream& stream) { return key_of(stream.device_index(), stream.id()); }
int64_t current(int device) { return stream_now.count(device) ? stream_now[device] : 0; }

void learn(Clock& clock, const Clock& other) {
  for (auto& [stream, tick] : other) clock[stream] = std::max(clock[stream], tick);
}

bool knows(int64_t stream, const Access& access) {
  return stream == access.stream || clocks[stream][access.stream] >= access.tick || host[access.stream] >= access.tick;
}

// An operation on the current stream of the tensor's device reads or writes it.
void touch(const at::Tensor& t, bool writes, const std::string& op) {
  void* base = t.storage().mutable_data();
  if (!base || !t.numel()) return;
  size_t begin = t.storage_offset() * t.itemsize(), end = begin + t.itemsize();
  for (int64_t dim = 0; dim < t.dim(); dim++) end += (t.size(dim) - 1) * t.stride(dim) * t.itemsize();
  std::lock_guard<std::mutex> guard(lock);
  auto found = memories.find(base);
  if (found == memories.end()) return;
  auto stream = key_of(t.device().index(), current(t.device().index()));
  auto tick = ++clocks[stream][stream];
  std::vector<Access> kept;
  for (auto& other : found->second.accesses) {
    bool overlaps = other.begin < end && begin < other.end;
    TORCH_CHECK(!overlaps || !(writes || other.writes) || knows(stream, other), "RACE: ", op, " on stream ", stream, writes ? " writes" : " reads",
                " what ", other.op, other.writes ? " wrote" : " reads", " on stream ", other.stream, " without having waited for it; ", t.sizes());
    bool covered = begin <= other.begin && other.end <= end && (writes || (!other.writes && other.stream == stream));
    if (!covered) kept.push_back(other);
  }
  kept.push_back({stream, tick, op, begin, end, writes});
  found->second.accesses.swap(kept);
}

void expect_may_wait(const std::string& op) { TORCH_CHECK(may_wait, op, " waits for the device"); }

void wait_for_stream(int device, const std::string& op) {
  expect_may_wait(op);
  std::lock_guard<std::mutex> guard(lock);
  learn(host, clocks[key_of(device, current(device))]);
}

// ---------------------------------------------------------------- memory

struct Allocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    c10::Device device(KIND, device_now);
    void* data = nullptr;
    if (!bytes) return {nullptr, nullptr, &release, device};
    TORCH_CHECK(!posix_memalign(&data, 512, bytes), "out of memory");
    memset(data, 0xFF, bytes);
    std::lock_guard<std::mutex> guard(lock);
    memories[data] = {key_of(device_now, current(device_now)), bytes, {}, {}};
    allocated += bytes;
    peak = std::max(peak, allocated);
    return {data, data, &release, device};
  }
  static void release(void* data) {
    if (!data) return;
    {
      std::lock_guard<std::mutex> guard(lock);
      auto& memory = memories.at(data);
      for (auto& access : memory.accesses)
        if (!memory.recorded.count(access.stream) && !knows(memory.home, access))
          found_late.push_back("RACE: memory of stream " + std::to_string(memory.home) + " is freed while " + access.op + " uses it on stream " +
                               std::to_string(access.stream));
      allocated -= memory.bytes;
      memories.erase(data);
    }
    free(data);
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override { memcpy(to, from, bytes); }
};

Allocator allocator;
REGISTER_ALLOCATOR(KIND, &allocator);

void resize_storage(const c10::Storage& storage, size_t bytes) {
  auto fresh = allocator.allocate(bytes);
  if (fresh.get()) memcpy(fresh.get(), storage.data(), std::min(bytes, storage.nbytes()));
  storage.unsafeGetStorageImpl()->set_data_ptr(std::move(fresh));
  storage.unsafeGetStorageImpl()->set_nbytes(bytes);
}

// ---------------------------------------------------------------- devices, streams and events, as torch asks for them

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return KIND; }
  c10::Device getDevice() const override { return {KIND, (c10::DeviceIndex)device_now}; }
  c10::Device exchangeDevice(c10::Device device) const override { auto old = getDevice(); setDevice(device); return old; }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.index() < count_devices(), "invalid device ordinal");
    device_now = index_of(device);
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override { device_now = index_of(device); }
  c10::DeviceIndex deviceCount() const noexcept override { return count_devices(); }
  static c10::Stream stream(int device, int64_t id) { return c10::Stream(c10::Stream::UNSAFE, c10::Device(KIND, device), id); }
  c10::Stream getStream(c10::Device device) const override { return stream(index_of(device), current(index_of(device))); }
  c10::Stream getDefaultStream(c10::Device device) const override { return stream(index_of(device), 0); }
  c10::Stream getNewStream(c10::Device device, int) const override {
    std::lock_guard<std::mutex> guard(lock);
    return stream(index_of(device), ++streams_made);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream exchangeStream(c10::Stream to) const override { auto old = getStream(to.device()); stream_now[to.device_index()] = to.id(); return old; }
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    std::lock_guard<std::mutex> guard(lock);
    if (!*event) *event = new Clock;
    *(Clock*)*event = clocks[key_of(stream)];
  }
  void block(void* event, const c10::Stream& stream) const override {
    std::lock_guard<std::mutex> guard(lock);
    if (event) learn(clocks[key_of(stream)], *(Clock*)event);
  }
  void synchronizeEvent(void* event) const override {
    std::lock_guard<std::mutex> guard(lock);
    if (event) learn(host, *(Clock*)event);
  }
  bool queryEvent(void* event) const override { synchronizeEvent(event); return true; }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete (Clock*)event; }
  void synchronizeStream(const c10::Stream& stream) const override { std::lock_guard<std::mutex> guard(lock); learn(host, clocks[key_of(stream)]); }
  bool queryStream(const c10::Stream& stream) const override { synchronizeStream(stream); return true; }
  void synchronizeDevice(const c10::DeviceIndex) const override {
    std::lock_guard<std::mutex> guard(lock);
    for (auto& [stream, clock] : clocks) learn(host, clock);
  }
  double elapsedTime(void*, void*, const c10::DeviceIndex) const override { return 1.0; }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    std::lock_guard<std::mutex> guard(lock);
    if (memories.count(data.get())) memories[data.get()].recorded.insert(key_of(stream));
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Generator final : at::CPUGeneratorImpl {   // the CPU's kernels take it while it says that it is the CPU's
  explicit Generator(int device) { device_ = c10::Device(KIND, device); }
  void become(c10::Device device) { device_ = device; }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  void init() const override {}
  c10::DeviceIndex deviceCount() const override { return count_devices(); }
  c10::DeviceIndex getCurrentDevice() const override { return device_now; }
  void setCurrentDevice(c10::DeviceIndex device) const override { device_now = device; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override { return std::exchange(device_now, device); }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return std::exchange(device_now, device); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return c10::GetAllocator(c10::DeviceType::CPU); }
  bool isPinnedPtr(const void*) const override { return true; }
  at::Device getDeviceFromPtr(void*) const override { return {KIND, (c10::DeviceIndex)device_now}; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override { return at::globalContext().defaultGenerator(c10::kCPU); }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override { return at::make_generator<Generator>(device < 0 ? device_now : device); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override { resize_storage(storage, bytes); }
};
Hooks hooks;
const bool hooked = [] { at::RegisterPrivateUse1HooksInterface(&hooks); return true; }();

// ---------------------------------------------------------------- the operations that make, move and view tensors

bool ours(const at::Tensor& t) { return t.defined() && t.device().type() == KIND; }

at::Tensor on_cpu(const at::Tensor& t) {
  auto data = t.storage().nbytes() ? (char*)t.storage().mutable_data() + t.storage_offset() * t.itemsize() : nullptr;
  auto alias = at::from_blob(data, t.sizes(), t.strides(), [](void*) {}, at::TensorOptions().dtype(t.dtype()).device(at::kCPU));
  if (t.is_conj()) alias._set_conj(true);
  if (t.is_neg()) alias._set_neg(true);
  return alias;
}

constexpr c10::DispatchKeySet KEYS(c10::DispatchKey::PrivateUse1);

at::Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<at::Device> device,
                 std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(device.value_or(c10::Device(KIND, device_now)));
  return at::detail::empty_generic(size, &allocator, KEYS, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                         std::optional<at::Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(device.value_or(c10::Device(KIND, device_now)));
  return at::detail::empty_strided_generic(size, stride, &allocator, KEYS, c10::dtype_or_default(dtype));
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  if (ours(from)) touch(from, false, "copy");
  if (ours(to)) touch(to, true, "copy");
  (ours(to) ? on_cpu(to) : to).copy_(ours(from) ? on_cpu(from) : from);
  if (!non_blocking && !(ours(from) && ours(to))) wait_for_stream((ours(from) ? from : to).device().index(), "a copy between host and device");
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) { to.resize_(from.sizes()); return copy_from(from, to, false); }

at::Scalar item(const at::Tensor& t) { touch(t, false, "item"); wait_for_stream(t.device().index(), "item"); return on_cpu(t).item(); }

at::Tensor& set_view(at::Tensor& t, c10::Storage storage, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  t.unsafeGetTensorImpl()->set_storage_keep_dtype(storage);
  t.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride, offset);
  return t;
}
at::Tensor& set_storage(at::Tensor& t, c10::Storage storage) { return set_view(t, storage, 0, {(int64_t)(storage.nbytes() / t.itemsize())}, {1}); }
at::Tensor& set_tensor(at::Tensor& t, const at::Tensor& other) { return set_view(t, other.storage(), other.storage_offset(), other.sizes(), other.strides()); }
at::Tensor& set_nothing(at::Tensor& t) { return set_storage(t, c10::Storage(c10::Storage::use_byte_size_t(), 0, &allocator, true)); }

const at::Tensor& resize_to(const at::Tensor& t, c10::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  auto impl = t.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(size);
  if (format && *format != at::MemoryFormat::Contiguous && *format != at::MemoryFormat::Preserve) impl->empty_tensor_restride(*format);
  size_t needed = (impl->numel() + impl->storage_offset()) * impl->itemsize();
  if (impl->numel() && needed > t.storage().nbytes()) resize_storage(t.storage(), needed);
  return t;
}

void record_stream(at::Tensor& t, c10::Stream stream) { Guard().recordDataPtrOnStream(t.storage().data_ptr(), stream); }

at::Tensor unfold(const at::Tensor& t, int64_t dim, int64_t size, int64_t step) { return at::native::unfold(t, dim, size, step); }

int64_t plain_attention(const at::Tensor&, const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&, double, bool,
                        std::optional<double>, bool) { return 0; }

// ---------------------------------------------------------------- all others

const std::set<std::string> INDEXES = {"aten::index.Tensor", "aten::index.Tensor_out", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"};

// What has as many elements as its input's values say: the host must know them.
const std::set<std::string> SIZED_BY_VALUES = {"aten::bincount", "aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::unique_dim"};

bool must_know_values(const std::string& name, const std::vector<c10::IValue>& given) {
  if (name == "aten::repeat_interleave.Tensor") return given[1].isNone();
  if (!INDEXES.count(name)) return SIZED_BY_VALUES.count(name);
  for (const std::optional<at::Tensor>& t : given[1].toOptionalTensorVector()) if (t && t->scalar_type() == at::kBool) return true;
  return false;
}

at::Tensor brought_here(const at::Tensor& made, c10::Device device, const std::string& op) {
  if (!made.defined()) return made;
  c10::DeviceGuard guard(device);
  auto options = made.options().device(device).pinned_memory(false);
  auto here = made.is_non_overlapping_and_dense() ? at::empty_strided(made.sizes(), made.strides(), options) : at::empty(made.sizes(), options);
  if (made.numel()) { on_cpu(here).copy_(made); touch(here, true, op); }
  return here;
}

struct Call {
  std::string name;
  c10::Device device{KIND, (c10::DeviceIndex)device_now};
  bool has_ours = false, has_foreign_generator = false;
  Generator* generator = nullptr;
  std::vector<at::Tensor> on_the_cpu;
  std::vector<std::pair<at::Tensor, at::Tensor>> written;   // ours, its alias

  at::Tensor take(const at::Tensor& t, bool writes) {
    if (!ours(t)) { if (t.defined() && t.dim() > 0) on_the_cpu.push_back(t); return t; }
    TORCH_CHECK(!has_ours || device == t.device(), name, ": Expected all tensors to be on the same device, but found ", device, " and ", t.device());
    device = t.device();
    has_ours = true;
    // What an operation may resize must have memory that can be.
    auto alias = writes && !t.numel() ? at::empty(t.sizes(), at::TensorOptions().dtype(t.dtype()).device(at::kCPU)) : on_cpu(t);
    if (writes) written.emplace_back(t, alias);
    touch(t, writes, name);
    return alias;
  }
  void take(c10::IValue& value, bool writes) {
    if (value.isTensor()) value = take(value.toTensor(), writes);
    else if (value.isTensorList()) {
      c10::List<at::Tensor> taken;
      for (const at::Tensor& t : value.toTensorVector()) taken.push_back(take(t, writes));
      value = taken;
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> taken;
      for (const std::optional<at::Tensor>& t : value.toOptionalTensorVector()) taken.push_back(t ? std::optional<at::Tensor>(take(*t, writes)) : std::nullopt);
      value = taken;
    } else if (value.isDevice() && value.toDevice().type() == KIND) {
      device = c10::Device(KIND, index_of(value.toDevice()));
      value = c10::Device(at::kCPU);
    } else if (value.isGenerator()) {
      auto given = value.toGenerator();
      if (given.device().type() == KIND) generator = (Generator*)given.unsafeGetGeneratorImpl();
      else has_foreign_generator = true;
    }
  }
  void expect_one_device() const {
    TORCH_CHECK(!has_ours || on_the_cpu.empty() || INDEXES.count(name), name, ": Expected all tensors to be on the same device, but found ", device,
                " and cpu");
    TORCH_CHECK(!has_ours || !has_foreign_generator, name, ": Expected a generator of ", device, " but found one of the CPU");
  }
};

// A view that an operation gave of one of its arguments.
at::Tensor view_of(const at::Tensor& given, const at::Tensor& made) {
  auto view = at::empty({0}, made.options().device(given.device()));
  auto offset = ((char*)made.const_data_ptr() - (char*)given.storage().mutable_data()) / made.itemsize();
  return set_view(view, given.storage(), offset, made.sizes(), made.strides());
}

void run_on_cpu(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  auto& schema = op.schema();
  size_t n = schema.arguments().size(), first = stack->size() - n;
  std::vector<c10::IValue> given(stack->end() - n, stack->end());
  Call call{c10::toString(op.operator_name())};
  if (must_know_values(call.name, given)) expect_may_wait(call.name);
  for (size_t i = 0; i < n; i++) {
    auto info = schema.arguments()[i].alias_info();
    call.take((*stack)[first + i], info && info->isWrite());
  }
  call.expect_one_device();
  c10::DeviceGuard guard(call.device);
  if (call.generator) call.generator->become(at::kCPU);
  op.callBoxed(stack);
  if (call.generator) call.generator->become(call.device);
  for (auto& [t, alias] : call.written)
    if (alias.sizes() != t.sizes()) { resize_to(t, alias.sizes(), {}); on_cpu(t).copy_(alias); }
  auto& returns = schema.returns();
  for (size_t r = 0; r < returns.size(); r++) {
    auto& value = (*stack)[stack->size() - returns.size() + r];
    if (auto info = returns[r].alias_info()) {
      for (size_t i = 0; i < n; i++) {
        auto of = schema.arguments()[i].alias_info();
        if (!of || of->beforeSets() != info->beforeSets()) continue;
        value = info->isWrite() ? given[i] : c10::IValue(view_of(given[i].toTensor(), value.toTensor()));
        break;
      }
    } else if (value.isTensor()) {
      value = brought_here(value.toTensor(), call.device, call.name);
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> here;
      for (const at::Tensor& t : value.toTensorVector()) here.push_back(brought_here(t, call.device, call.name));
      value = here;
    }
  }
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", at::native::view);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("unfold", unfold);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", item);
  m.impl("set_.source_Storage_storage_offset", set_view);
  m.impl("set_.source_Storage", set_storage);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("set_", set_nothing);
  m.impl("resize_", resize_to);
  m.impl("record_stream", record_stream);
  m.impl("_fused_sdp_choice", plain_attention);
}
TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>()); }
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("on_cpu", [](const at::Tensor& t) { TORCH_CHECK(ours(t), "a tensor on ", t.device()); return on_cpu(t); });
  m.def("touch", &touch);
  m.def("set_device", [](int device) { Guard().setDevice(c10::Device(KIND, device)); });
  m.def("current_device", [] { return device_now; });
  m.def("device_count", &count_devices);
  m.def("allocated", [] { return allocated; });
  m.def("peak", [] { return peak; });
  m.def("reset_peak", [] { peak = allocated; });
  m.def("set_may_wait", [](bool may) { may_wait = may; });
  m.def("late", [] { std::lock_guard<std::mutex> guard(lock); return std::exchange(found_late, {}); });
}
