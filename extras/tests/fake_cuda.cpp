// What a CPU build of torch lacks to trace fake CUDA tensors: a device guard that does nothing, and hooks that say that
// there is one device. Nothing here computes; extras/tests/fake_gpu.py builds and loads it.

#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <new>

namespace {

const c10::Device DEVICE(c10::DeviceType::CUDA, 0);
const c10::Stream STREAM(c10::Stream::DEFAULT, DEVICE);

struct Guard final : c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> {
  c10::Device exchangeDevice(c10::Device) const override { return DEVICE; }
  c10::Device getDevice() const override { return DEVICE; }
  c10::Stream getStream(c10::Device) const noexcept override { return STREAM; }
  c10::Stream exchangeStream(c10::Stream) const noexcept override { return STREAM; }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
};

struct CUDAHooks final : at::CUDAHooksInterface {
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
};

// torch has looked for hooks when it was imported, and keeps an object that says "no GPU". Ours takes its place.
const bool PLACED = [] {
  auto* kept = const_cast<at::CUDAHooksInterface*>(&at::detail::getCUDAHooks());
  static_assert(sizeof(CUDAHooks) == sizeof(at::CUDAHooksInterface));
  new (kept) CUDAHooks({});
  return true;
}();

}  // namespace

namespace c10 {
using ::Guard;
C10_REGISTER_GUARD_IMPL(CUDA, Guard)
}  // namespace c10
