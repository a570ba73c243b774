// The simulated accelerator as torch's PrivateUse1 device: memory, streams and events, and every operator. An operator
// runs on the CPU, over the same memory, when its item's turn comes; shapes come from the Meta device at issue.
#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/native/TensorFactories.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <set>

#include "device.h"
#include "engine.h"

namespace sim {
namespace {

constexpr auto kDevice = c10::DeviceType::PrivateUse1;
constexpr int kPoolStreams = 4;

thread_local int current_device = 0;
thread_local std::vector<int> current_streams;  // by device


int index_of(c10::Device device) { return device.has_index() ? device.index() : current_device; }

int& current_stream(int device) {
  for (int next = int(current_streams.size()); next <= device; ++next) current_streams.push_back(next);
  return current_streams.at(device);
}

// Memory

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    char* memory = engine().allocate(size, current_device, current_stream(current_device));
    return {memory, memory, &deallocate, c10::Device(kDevice, c10::DeviceIndex(current_device))};
  }
  static void deallocate(void* memory) {
    if (memory != nullptr) engine().free(static_cast<char*>(memory));
  }
  c10::DeleterFnPtr raw_deleter() const override { return &deallocate; }
  void copy_data(void* to, const void* from, size_t size) const override { default_copy_data(to, from, size); }
};
DeviceAllocator device_allocator;
REGISTER_ALLOCATOR(kDevice, &device_allocator)

std::mutex pinned_mutex;
std::map<uintptr_t, size_t> pinned;

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    engine().blame("allocates pinned memory");
    void* memory = std::aligned_alloc(64, (size + 64) / 64 * 64);
    std::lock_guard<std::mutex> lock(pinned_mutex);
    pinned[uintptr_t(memory)] = size;
    return {memory, memory, &deallocate, c10::Device(c10::kCPU)};
  }
  static void deallocate(void* memory) {
    std::lock_guard<std::mutex> lock(pinned_mutex);
    pinned.erase(uintptr_t(memory));
    std::free(memory);
  }
  c10::DeleterFnPtr raw_deleter() const override { return &deallocate; }
  void copy_data(void* to, const void* from, size_t size) const override { default_copy_data(to, from, size); }
};

bool is_pinned(const void* memory) {
  std::lock_guard<std::mutex> lock(pinned_mutex);
  auto next = pinned.upper_bound(uintptr_t(memory));
  if (next == pinned.begin()) return false;
  auto found = std::prev(next);
  return uintptr_t(memory) < found->first + found->second;
}

void resize_storage(const c10::Storage& storage, size_t size) {
  auto* impl = storage.unsafeGetStorageImpl();
  c10::OptionalDeviceGuard guard(storage.device());
  auto fresh = device_allocator.allocate(size);
  const size_t kept = std::min(size, storage.nbytes());
  char *to = static_cast<char*>(fresh.get()), *from = static_cast<char*>(storage.mutable_data());
  if (kept > 0) {
    const Span read{uintptr_t(from), uintptr_t(from) + kept, false}, write{uintptr_t(to), uintptr_t(to) + kept, true};
    engine().issue(current_stream(index_of(storage.device())), "resize of a storage", {read, write},
                   [=] { std::memcpy(to, from, kept); });
  }
  impl->set_data_ptr_noswap(std::move(fresh));
  impl->set_nbytes(size);
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return c10::DeviceIndex(engine().devices()); }
  c10::DeviceIndex getCurrentDevice() const override { return c10::DeviceIndex(current_device); }
  void setCurrentDevice(c10::DeviceIndex device) const override { current_device = device; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    return c10::DeviceIndex(std::exchange(current_device, int(device)));
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return device < 0 ? c10::DeviceIndex(current_device) : exchangeDevice(device);
  }
  bool isPinnedPtr(const void* memory) const override { return is_pinned(memory); }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    static PinnedAllocator allocator;
    return &allocator;
  }
  c10::Device getDeviceFromPtr(void* memory) const override {
    return c10::Device(kDevice, c10::DeviceIndex(engine().device_at(memory)));
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override { resize_storage(storage, size); }
};

// Devices, streams, events

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kDevice; }
  c10::Device exchangeDevice(c10::Device device) const override {
    return c10::Device(kDevice, c10::DeviceIndex(std::exchange(current_device, index_of(device))));
  }
  c10::Device getDevice() const override { return c10::Device(kDevice, c10::DeviceIndex(current_device)); }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(index_of(device) < engine().devices(), "Expected one of ", engine().devices(), " devices, got ", device);
    current_device = index_of(device);
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override { current_device = index_of(device); }
  c10::Stream stream(int device, int number) const {
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(kDevice, c10::DeviceIndex(device)), number);
  }
  c10::Stream getStream(c10::Device device) const override {
    return stream(index_of(device), current_stream(index_of(device)));
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return stream(index_of(device), index_of(device)); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    static std::mutex mutex;
    static std::map<int, std::vector<int>> pools;
    static int next = 0;
    std::lock_guard<std::mutex> lock(mutex);
    auto& pool = pools[index_of(device)];
    while (pool.size() < kPoolStreams) pool.push_back(engine().new_stream(index_of(device)));
    return stream(index_of(device), pool[next++ % kPoolStreams]);
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    return stream(index_of(device), engine().new_stream(index_of(device)));
  }
  c10::Stream exchangeStream(c10::Stream other) const override {
    const int device = other.device_index();
    return stream(device, std::exchange(current_stream(device), int(other.id())));
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override { delete static_cast<Moment*>(event); }
  void record(void** event, const c10::Stream& stream, c10::DeviceIndex device, c10::EventFlag) const override {
    TORCH_CHECK(device < 0 || device == stream.device_index(), "Expected a stream of the event's device ", int(device),
                ", got one of device ", int(stream.device_index()));  // as CUDA does
    if (*event == nullptr) *event = new Moment();
    *static_cast<Moment*>(*event) = engine().record(int(stream.id()));
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event != nullptr) engine().wait_for(int(stream.id()), *static_cast<Moment*>(event));
  }
  bool queryEvent(void* event) const override {
    return event == nullptr || engine().is_done(*static_cast<Moment*>(event));
  }
  bool queryStream(const c10::Stream& stream) const override {
    return engine().is_done(engine().record(int(stream.id())));
  }
  c10::DeviceIndex deviceCount() const noexcept override { return c10::DeviceIndex(engine().devices()); }
  void synchronizeStream(const c10::Stream& stream) const override {
    engine().note_sync("synchronize a stream");
    engine().finish(engine().record(int(stream.id())));
  }
  void synchronizeEvent(void* event) const override {
    if (event == nullptr) return;
    engine().note_sync("synchronize an event");
    engine().finish(*static_cast<Moment*>(event));
  }
  void synchronizeDevice(c10::DeviceIndex device) const override {
    engine().note_sync("synchronize a device");
    engine().finish_device(device);
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    engine().record_use(data.get(), int(stream.id()));
  }
  double elapsedTime(void* first, void* last, c10::DeviceIndex) const override {
    return 1e3 * (static_cast<Moment*>(last)->seconds - static_cast<Moment*>(first)->seconds);
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

// Operators

bool is_here(const at::Tensor& tensor) { return tensor.defined() && tensor.device().type() == kDevice; }

std::pair<int64_t, int64_t> reach(const at::Tensor& tensor) {  // in elements, from its first one
  int64_t last = 0;
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) last += (tensor.size(dim) - 1) * tensor.stride(dim);
  return {0, tensor.numel() ? last + 1 : 0};
}

at::Tensor with_bits_of(const at::Tensor& tensor, at::Tensor plain) {
  if (tensor.is_conj()) plain._set_conj(true);
  if (tensor.is_neg()) plain._set_neg(true);
  return plain;
}

at::Tensor meta_of(const at::Tensor& tensor) {
  return with_bits_of(tensor, at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kMeta)));
}

}  // namespace

at::Tensor on_host(const at::Tensor& tensor) {
  auto options = at::TensorOptions().dtype(tensor.dtype()).device(at::kCPU);
  if (tensor.numel() == 0) return at::empty_strided(tensor.sizes(), tensor.strides(), options);
  return with_bits_of(tensor, at::from_blob(tensor.mutable_data_ptr(), tensor.sizes(), tensor.strides(), options));
}

Span span_of(const at::Tensor& tensor, bool is_write) {
  const auto size = int64_t(tensor.dtype().itemsize());
  const auto begin = uintptr_t(tensor.const_data_ptr());
  return {begin, begin + size_t(reach(tensor).second * size), is_write};
}

int stream_of(c10::Device device) { return current_stream(index_of(device)); }

namespace {

using torch::jit::Stack;

// Apply a function to every tensor of a value: tensors, optional tensors and lists of either.
c10::IValue mapped(const c10::IValue& value, const std::function<at::Tensor(const at::Tensor&)>& change) {
  if (value.isTensor()) return change(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> out;
    for (const at::Tensor& tensor : value.toTensorVector()) out.push_back(change(tensor));
    return out;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> out;
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector()) {
      out.push_back(tensor.has_value() ? std::optional<at::Tensor>(change(*tensor)) : std::nullopt);
    }
    return out;
  }
  return value;
}

at::Generator& generator() {
  static at::Generator one = at::make_generator<at::CPUGeneratorImpl>(0);
  return one;
}

const std::set<std::string> kReadsOnHost{"aten::_local_scalar_dense", "aten::equal", "aten::is_nonzero"};

int device_of(const Stack& arguments) {
  int device = -1;
  for (const auto& value : arguments) {
    mapped(value, [&](const at::Tensor& tensor) {
      if (is_here(tensor) && device < 0) device = tensor.device().index();
      return tensor;
    });
    if (value.isDevice() && value.toDevice().type() == kDevice && device < 0) device = index_of(value.toDevice());
  }
  return device < 0 ? current_device : device;
}

void run_on_host(const c10::OperatorHandle& op, Stack* stack) {
  c10::impl::ExcludeDispatchKeyGuard no_autograd(c10::autograd_dispatch_keyset);
  if (op.schema().operator_name().name == "aten::native_layer_norm_backward" && (*stack)[1].toTensor().is_cpu()) {
    const auto dtype = (*stack)[1].toTensor().scalar_type();  // devices have statistics in fp32, the CPU in this one
    for (size_t n : {3, 4}) (*stack)[n] = (*stack)[n].toTensor().to(dtype);
  }
  op.callBoxed(stack);
}

// Every operator without a kernel of its own.
void any_operator(const c10::OperatorHandle& op, Stack* stack) {
  const auto& schema = op.schema();
  const auto name = schema.operator_name().name;
  const size_t count = schema.arguments().size();
  const Stack arguments(stack->end() - count, stack->end());
  const int device = device_of(arguments);
  c10::DeviceGuard guard(c10::Device(kDevice, c10::DeviceIndex(device)));
  const int stream = current_stream(device);

  // Shapes of what it returns
  Stack shapes;
  bool is_known = kReadsOnHost.count(name) == 0;
  std::vector<bool> is_fresh;
  bool has_fresh = false;
  for (const auto& out : schema.returns()) {
    is_fresh.push_back(out.alias_info() == nullptr);
    has_fresh = has_fresh || is_fresh.back();
  }
  bool resizes = false;
  for (size_t n = 0; n < count; ++n) {
    resizes = resizes || (schema.arguments()[n].is_out() && arguments[n].isTensor() && arguments[n].toTensor().numel() == 0);
  }
  auto to_meta = [](const at::Tensor& tensor) { return is_here(tensor) ? meta_of(tensor) : tensor; };
  if (is_known && (has_fresh || resizes)) {
    try {
      for (const auto& value : arguments) {
        shapes.push_back(value.isDevice() && value.toDevice().type() == kDevice ? c10::IValue(c10::Device(at::kMeta))
                                                                                : mapped(value, to_meta));
      }
      const Stack given = shapes;
      run_on_host(op, &shapes);
      for (size_t n = 0; resizes && n < count; ++n) {
        if (schema.arguments()[n].is_out() && arguments[n].isTensor()) {
          arguments[n].toTensor().resize_(given[n].toTensor().sizes());
        }
      }
    } catch (const c10::Error&) {
      is_known = false;  // they depend on values
    } catch (const torch::PyTorchError&) {
      is_known = false;
    } catch (const pybind11::error_already_set&) {
      is_known = false;
    }
  }

  // What it reads and writes
  std::vector<Span> spans;
  for (size_t n = 0; n < count; ++n) {
    const auto* alias = schema.arguments()[n].alias_info();
    const bool is_write = alias != nullptr && alias->isWrite();
    mapped(arguments[n], [&](const at::Tensor& tensor) {
      if (is_here(tensor) && tensor.numel()) spans.push_back(span_of(tensor, is_write));
      return tensor;
    });
  }
  auto host = std::make_shared<Stack>();
  auto to_host = [](const at::Tensor& tensor) {
    if (is_here(tensor)) return on_host(tensor);
    return tensor.defined() && tensor.device().is_cpu() ? tensor.detach().clone() : tensor;  // passed by value
  };
  for (size_t n = 0; n < count; ++n) {
    const auto& value = arguments[n];
    const auto type = schema.arguments()[n].type();
    if (value.isDevice() && value.toDevice().type() == kDevice) {
      host->push_back(c10::Device(at::kCPU));
    } else if (value.isNone() && schema.arguments()[n].name() == "generator") {
      host->push_back(generator());
    } else if (schema.arguments()[n].is_out() && value.isTensor()) {  // the CPU may resize it on the way
      host->push_back(at::empty({0}, at::TensorOptions().dtype(value.toTensor().dtype()).device(at::kCPU)));
    } else {
      host->push_back(mapped(value, to_host));
    }
  }

  if (!is_known) {  // the host must wait for values
    engine().note_sync(name);
    engine().issue(stream, name, spans, [op, host] { run_on_host(op, host.get()); });
    engine().finish(engine().record(stream));
    torch::jit::drop(*stack, count);
    for (size_t n = 0; n < host->size(); ++n) {
      stack->push_back(mapped((*host)[n], [&](const at::Tensor& tensor) {
        auto fresh = at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(kDevice, device));
        if (fresh.numel()) on_host(fresh).copy_(tensor);
        return fresh;
      }));
    }
    return;
  }

  // Memory of what it returns
  std::vector<at::Tensor> results;
  auto is_copied = is_fresh;
  Stack returned;
  std::vector<size_t> first;  // of the results of each return
  for (size_t n = 0; n < schema.returns().size(); ++n) {
    first.push_back(results.size());
    if (!is_fresh[n]) {
      const auto& wanted = schema.returns()[n].alias_info()->beforeSets();
      for (size_t m = 0; m < count; ++m) {
        const auto* alias = schema.arguments()[m].alias_info();
        if (alias == nullptr || alias->beforeSets() != wanted) continue;
        returned.push_back(arguments[m]);
        if (schema.arguments()[m].is_out() && arguments[m].isTensor()) {
          is_copied[n] = true;
          results.push_back(arguments[m].toTensor());
        }
        break;
      }
      continue;
    }
    returned.push_back(mapped(shapes[n], [&](const at::Tensor& shape) {
      if (!shape.defined()) return results.emplace_back();
      auto fresh = at::empty_strided(shape.sizes(), shape.strides(), shape.options().device(kDevice, device));
      results.push_back(fresh);
      if (fresh.numel()) spans.push_back(span_of(fresh, true));
      return fresh;
    }));
  }
  TORCH_INTERNAL_ASSERT(returned.size() == schema.returns().size(), name, " returns what it was not given");
  std::vector<at::Tensor> targets;
  for (const auto& result : results) targets.push_back(result.defined() ? on_host(result) : result);
  first.push_back(results.size());
  engine().issue(stream, name, spans, [op, host, targets, first, is_copied] {
    run_on_host(op, host.get());
    for (size_t n = 0; n < host->size(); ++n) {
      if (is_copied[n]) {
        size_t next = first[n];
        mapped((*host)[n], [&](const at::Tensor& tensor) {
          auto target = next < first[n + 1] ? targets[next++] : at::Tensor();
          // the CPU may return less than the shapes say: no gradient of an input that needs none, and no statistics of
          // a batch norm in evaluation
          if (target.defined() && tensor.defined() && tensor.numel()) target.copy_(tensor);
          return tensor;
        });
      }
    }
    host->clear();
  });
  torch::jit::drop(*stack, count);
  for (auto& value : returned) stack->push_back(std::move(value));
}

// What torch asks of devices outside it in the place of convolutions.
void convolution(const c10::OperatorHandle&, Stack* stack) {
  any_operator(c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution", ""), stack);
}

void convolution_backward(const c10::OperatorHandle&, Stack* stack) {
  const auto gradient = stack->end() - 10;
  const std::vector<int64_t> sizes_of_bias{gradient->toTensor().size(1)};
  stack->insert(gradient + 3, c10::IValue(sizes_of_bias));
  any_operator(c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution_backward", ""), stack);
}

at::Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(size, &device_allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(size, stride, &device_allocator,
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}

const at::Tensor& resize(const at::Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat>) {
  const size_t needed = size_t(c10::multiply_integers(size) + self.storage_offset()) * self.dtype().itemsize();
  if (needed > self.storage().nbytes()) resize_storage(self.storage(), needed);
  self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  return self;
}

at::Tensor& set_storage(at::Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef size,
                        at::IntArrayRef stride) {
  at::native::checkSetStorage(self, std::move(source), offset, size, stride);
  self.unsafeGetTensorImpl()->set_storage_offset(offset);
  self.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride);
  return self;
}

at::Tensor& set_whole_storage(at::Tensor& self, at::Storage source) {
  const auto numel = int64_t(source.nbytes() / self.dtype().itemsize());
  return set_storage(self, std::move(source), 0, {numel}, {1});
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

at::Tensor& set_nothing(at::Tensor& self) {
  c10::OptionalDeviceGuard guard(self.device());
  return set_storage(self, c10::Storage(c10::Storage::use_byte_size_t(), 0, device_allocator.allocate(0), &device_allocator, true), 0, {0}, {1});
}

// A copy between a device and the host, on one device, or between two.
at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  if (to.numel() == 0) return to;
  if (is_here(from) && is_here(to)) {
    const int stream = stream_of(from.device()), other = stream_of(to.device());
    if (stream != other) engine().wait_for(stream, engine().record(other));
    engine().issue(stream, "aten::copy_", {span_of(from, false), span_of(to, true)},
                   [to = on_host(to), from = on_host(from)]() mutable { to.copy_(from); }, Work::copy);
    if (stream != other) engine().wait_for(other, engine().record(stream));
    return to;
  }
  const bool to_device = is_here(to);
  const at::Tensor& host = to_device ? from : to;
  const bool is_pinned_host = is_pinned(host.const_data_ptr());
  const int stream = stream_of((to_device ? to : from).device());
  if (to_device) {
    // Pageable memory is staged before the call returns; pinned memory is read when the copy's turn comes.
    auto source = is_pinned_host ? from : from.clone();
    engine().issue(stream, "copy to the device", {span_of(to, true)},
                   [to = on_host(to), source]() mutable { to.copy_(source); }, Work::copy);
  } else {
    engine().issue(stream, "copy to the host", {span_of(from, false)},
                   [to, from = on_host(from)]() mutable { to.copy_(from); }, Work::copy);
  }
  if (!non_blocking || (!to_device && !is_pinned_host)) {
    engine().note_sync(to_device ? "blocking copy to the device" : "blocking copy to the host");
    engine().finish(engine().record(stream));
  }
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  if (to.sizes() != from.sizes()) to.resize_(from.sizes());
  return copy_from(from, to, false);
}

at::Scalar local_scalar(const at::Tensor& self) {
  auto value = at::empty({}, self.options().device(at::kCPU));
  const int stream = stream_of(self.device());
  engine().issue(stream, "aten::item", {span_of(self, false)},
                 [value, from = on_host(self)]() mutable { value.copy_(from.reshape({})); }, Work::copy);
  engine().note_sync("item");
  engine().finish(engine().record(stream));
  return value.item();
}

bool equal(const at::Tensor& self, const at::Tensor& other) {
  if (self.sizes() != other.sizes()) return false;
  auto same = std::make_shared<bool>();
  const int stream = stream_of(self.device());
  engine().issue(stream, "aten::equal", {span_of(self, false), span_of(other, false)},
                 [=, left = on_host(self), right = on_host(other)] { *same = at::equal(left, right); });
  engine().note_sync("torch.equal");
  engine().finish(engine().record(stream));
  return *same;
}

void record_stream(at::Tensor& self, c10::Stream stream) {
  engine().record_use(self.storage().data(), int(stream.id()));
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&any_operator>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("resize_", &resize);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("set_.source_Storage", &set_whole_storage);
  m.impl("set_.source_Tensor", &set_tensor);
  m.impl("set_", &set_nothing);
  m.impl("view", &at::native::view);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("unfold", &at::native::unfold);
  m.impl("view_as_real", &at::native::view_as_real);
  m.impl("view_as_complex", &at::native::view_as_complex);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &local_scalar);
  m.impl("equal", &equal);
  m.impl("record_stream", &record_stream);
  m.impl("convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution>());
  m.impl("convolution_backward_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution_backward>());
}

}  // namespace

void init_collectives(pybind11::module_& m);

}  // namespace sim

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace sim;
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  m.def("configure", [](int devices, bool late, const std::string& library) {
    Engine::get().configure(devices, late, library);
  });
  m.def("train_on", [](int device) { Engine::get().train_on(device); }, "work on other devices is a fault from now on");
  m.def("device_count", [] { return Engine::get().devices(); });
  m.def("current_device", [] { return current_device; });
  m.def("set_device", [](int device) { Guard().setDevice(c10::Device(kDevice, c10::DeviceIndex(device))); });
  m.def("synchronize", [](int device) { Engine::get().finish_device(device); }, "not counted as a host synchronisation");
  m.def("manual_seed", [](uint64_t seed) { generator().set_current_seed(seed); });
  m.def("races", [] { return Engine::get().races(); });
  m.def("faults", [] { return Engine::get().faults(); });
  m.def("host_syncs", [] {
    std::vector<std::pair<std::string, std::string>> found;
    for (const auto& sync : Engine::get().syncs()) found.emplace_back(sync.what, sync.site);
    return found;
  });
  m.def("messages", [] {
    std::vector<std::tuple<std::string, std::string, std::string, int64_t>> found;
    for (const auto& one : Engine::get().messages()) found.emplace_back(one.group, one.kind, one.dtype, one.numel);
    return found;
  });
  m.def("clear_reports", [] { Engine::get().clear_reports(); });
  m.def("drop", [](const std::string& what, const std::string& line) { Engine::get().drop_next(what, line); });
  m.def("allocated", [](int device) { return Engine::get().allocated(device, false); });
  m.def("most_allocated", [](int device) { return Engine::get().allocated(device, true); },
        "the most since the last call");
  init_collectives(m);
}
