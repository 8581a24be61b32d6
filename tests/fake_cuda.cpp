// Fake CUDA devices for a CPU build of torch: they have indices, streams and pinned host memory, but
// run nothing. tests/fake_cuda.py uses them. All of this is private to torch: check each release.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <atomic>
#include <mutex>
#include <set>

constexpr c10::DeviceIndex DEVICES = 4;
thread_local c10::DeviceIndex current = 0;
thread_local int64_t streams[DEVICES] = {};  // the current one of each device; 0 is the default

c10::Device cuda(c10::DeviceIndex index) { return {c10::DeviceType::CUDA, index}; }
c10::DeviceIndex exchange(c10::DeviceIndex index) { return index < 0 ? current : std::exchange(current, index); }
c10::Stream stream(c10::DeviceIndex index, int64_t id) { return c10::Stream(c10::Stream::UNSAFE, cuda(index), id); }
c10::DeviceIndex index_of(c10::Device d) { return d.has_index() ? d.index() : current; }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::DeviceType::CUDA; }
  c10::Device exchangeDevice(c10::Device d) const override { return cuda(exchange(d.index())); }
  c10::Device getDevice() const override { return cuda(current); }
  void setDevice(c10::Device d) const override { exchange(d.index()); }
  void uncheckedSetDevice(c10::Device d) const noexcept override { exchange(d.index()); }
  c10::Stream getStream(c10::Device d) const override { return stream(index_of(d), streams[index_of(d)]); }
  c10::Stream getDefaultStream(c10::Device d) const override { return stream(index_of(d), 0); }
  c10::Stream getNewStream(c10::Device d, int) const override {
    static std::atomic<int64_t> ids = 0;
    return stream(index_of(d), ++ids);
  }
  c10::Stream exchangeStream(c10::Stream s) const override {
    return stream(s.device_index(), std::exchange(streams[s.device_index()], s.id()));
  }
  c10::DeviceIndex deviceCount() const noexcept override { return DEVICES; }
  void record(void** event, const c10::Stream&, c10::DeviceIndex, c10::EventFlag) const override { *event = (void*)1; }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, c10::DeviceIndex) const noexcept override {}
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(c10::DeviceIndex) const override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
  double elapsedTime(void*, void*, c10::DeviceIndex) const override { return 1.0; }
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)

struct PinnedMemory final : c10::Allocator {
  inline static std::mutex mutex;
  inline static std::set<const void*> blocks;
  static void forget(void* data) {
    { std::lock_guard lock(mutex); blocks.erase(data); }
    c10::GetDefaultCPUAllocator()->raw_deallocate(data);
  }
  c10::DataPtr allocate(size_t n) override {
    void* data = c10::GetDefaultCPUAllocator()->raw_allocate(n);
    std::lock_guard lock(mutex);
    blocks.insert(data);
    return {data, data, &forget, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &forget; }
  void copy_data(void* to, const void* from, size_t n) const override { default_copy_data(to, from, n); }
};

struct CUDAHooks final : at::CUDAHooksInterface {
  CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return DEVICES; }
  c10::DeviceIndex getCurrentDevice() const override { return current; }
  c10::DeviceIndex current_device() const override { return current; }
  void setCurrentDevice(c10::DeviceIndex d) const override { exchange(d); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex d) const override { return exchange(d); }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex d) const override { return exchange(d); }
  at::Allocator* getPinnedMemoryAllocator() const override { static PinnedMemory memory; return &memory; }
  bool isPinnedPtr(const void* data) const override {
    std::lock_guard lock(PinnedMemory::mutex);
    return PinnedMemory::blocks.count(data);
  }
};
using at::CUDAHooksRegistry;
using at::RegistererCUDAHooksRegistry;
REGISTER_CUDA_HOOKS(CUDAHooks)
