// Fake CUDA devices for a CPU build of torch: they have indices, streams and pinned host memory, but
// run nothing. tests/fake_cuda.py uses them. All of this is private to torch: check each release.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <sys/mman.h>

#include <atomic>

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
  void synchronizeEvent(void*) const override {}
  double elapsedTime(void*, void*, c10::DeviceIndex) const override { return 1.0; }
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)

// Pinned memory is one range of addresses, of which the kernel provides what is used.
struct PinnedMemory final : c10::Allocator {
  static constexpr size_t SIZE = size_t(1) << 40;
  static constexpr int FLAGS = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  char* start = (char*)mmap(nullptr, SIZE, PROT_READ | PROT_WRITE, FLAGS, -1, 0);
  std::atomic<size_t> used = 0;
  static void keep(void*) {}
  c10::DataPtr allocate(size_t n) override {
    void* data = start + used.fetch_add((n + 63) / 64 * 64);
    return {data, data, &keep, c10::Device(c10::DeviceType::CPU)};
  }
  void copy_data(void* to, const void* from, size_t n) const override { default_copy_data(to, from, n); }
};
PinnedMemory pinned;

struct CUDAHooks final : at::CUDAHooksInterface {
  CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned; }
  bool isPinnedPtr(const void* data) const override {
    return data >= pinned.start && data < pinned.start + pinned.SIZE;
  }
};
using at::CUDAHooksRegistry;
using at::RegistererCUDAHooksRegistry;
REGISTER_CUDA_HOOKS(CUDAHooks)
