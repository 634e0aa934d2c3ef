// Launches one GEMM kernel: D[M,N] = A[M,K] @ B[N,K]^T. Compiled once per toolchain, linked with each kernel's payload.
//
// The driver is found at run time, so a module loads on a machine that has none, and needs libtvm_ffi alone.
// Every argument is checked before anything reaches the GPU.

#include <cuda.h>
#include <dlfcn.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/function.h>

#include <algorithm>
#include <array>
#include <iterator>
#include <map>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <tuple>
#include <vector>

#include "payload.h"

namespace {

using tvm::ffi::TensorView;

// ------------------------------------------------------------------------------------------------ driver

struct Driver {
  decltype(&cuInit) init;
  decltype(&cuGetErrorName) error_name;
  decltype(&cuGetErrorString) error_string;
  decltype(&cuDeviceGet) device_get;
  decltype(&cuDeviceGetAttribute) device_attribute;
  decltype(&cuDevicePrimaryCtxRetain) primary_context_retain;
  decltype(&cuCtxGetCurrent) context_current;
  decltype(&cuCtxPushCurrent) context_push;
  decltype(&cuCtxPopCurrent) context_pop;
  decltype(&cuLibraryLoadData) library_load;
  decltype(&cuLibraryGetKernel) library_kernel;
  decltype(&cuKernelSetAttribute) kernel_attribute;
  decltype(&cuTensorMapEncodeTiled) encode_tiled;
  decltype(&cuOccupancyMaxActiveClusters) active_clusters;
  decltype(&cuMemsetD2D8Async) memset_rows;
  decltype(&cuMemsetD8Async) memset_all;
  decltype(&cuLaunchKernelEx) launch;
};

template <typename Function>
void Resolve(void* library, const char* name, Function* out) {
  *out = reinterpret_cast<Function>(dlsym(library, name));
  if (*out == nullptr) {
    TVM_FFI_THROW(RuntimeError) << "the CUDA driver lacks " << name << ": this module needs a driver for CUDA 12.3 or newer";
  }
}

void* OpenDriver() {
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    TVM_FFI_THROW(RuntimeError) << "no CUDA driver on this machine (libcuda.so.1 not found): install the NVIDIA driver";
  }
  return library;
}

Driver LoadDriver() {
  void* library = OpenDriver();
  Driver d{};
  Resolve(library, "cuInit", &d.init);
  Resolve(library, "cuGetErrorName", &d.error_name);
  Resolve(library, "cuGetErrorString", &d.error_string);
  Resolve(library, "cuDeviceGet", &d.device_get);
  Resolve(library, "cuDeviceGetAttribute", &d.device_attribute);
  Resolve(library, "cuDevicePrimaryCtxRetain", &d.primary_context_retain);
  Resolve(library, "cuCtxGetCurrent", &d.context_current);
  Resolve(library, "cuCtxPushCurrent_v2", &d.context_push);
  Resolve(library, "cuCtxPopCurrent_v2", &d.context_pop);
  Resolve(library, "cuLibraryLoadData", &d.library_load);
  Resolve(library, "cuLibraryGetKernel", &d.library_kernel);
  Resolve(library, "cuKernelSetAttribute", &d.kernel_attribute);
  Resolve(library, "cuTensorMapEncodeTiled", &d.encode_tiled);
  Resolve(library, "cuOccupancyMaxActiveClusters", &d.active_clusters);
  Resolve(library, "cuMemsetD2D8Async", &d.memset_rows);
  Resolve(library, "cuMemsetD8Async", &d.memset_all);
  Resolve(library, "cuLaunchKernelEx", &d.launch);
  return d;
}

const Driver& driver() {
  static const Driver instance = LoadDriver();
  return instance;
}

void Check(CUresult result, const char* action) {
  if (result == CUDA_SUCCESS) return;
  const char* name = "unknown error";
  const char* text = "";
  driver().error_name(result, &name);
  driver().error_string(result, &text);
  TVM_FFI_THROW(RuntimeError) << "CUDA: " << action << " failed: " << name << " (" << text << ")";
}

// ------------------------------------------------------------------------------------------------ arguments

constexpr int64_t kElementBytes = 2;
constexpr int64_t kMaxRowBytes = kElementBytes * ((int64_t{1} << 31) - 1);  // kernels take the distance as an int32
constexpr std::array<const char*, 3> kNames = {"A", "B", "D"};

std::string ShapeText(const TensorView& tensor) {
  std::string text = "(";
  for (int i = 0; i < tensor.ndim(); ++i) text += (i ? ", " : "") + std::to_string(tensor.size(i));
  return text + ")";
}

// What one call multiplies. Every extent is that of the module or zero, or M that of the call.
struct Extents {
  int64_t m, n, k;
};

constexpr int64_t kMaxRows = (int64_t{1} << 31) - 1 - 2048;  // coordinates of a last tile are 32-bit (kernels/rules.py)

Extents ExtentsOf(const TensorView& a, const TensorView& b) {
  const auto or_zero = [](const TensorView& tensor, int axis, int64_t whole) {
    return axis < tensor.ndim() && tensor.size(axis) == 0 ? 0 : whole;
  };
  const GemmPayload& p = gemm_payload;
  const int64_t m = p.dynamic_m && a.ndim() > 0 ? a.size(0) : p.m;
  if (m > kMaxRows) TVM_FFI_THROW(ValueError) << "A has " << m << " rows: at most " << kMaxRows << " are served";
  return {or_zero(a, 0, m), or_zero(b, 0, p.n), or_zero(a, 1, p.k)};
}

char* Address(const TensorView& tensor) { return static_cast<char*>(tensor.data_ptr()) + tensor.byte_offset(); }

// Distance of two rows in bytes. A stride of an extent of one never takes part in an address: anything may stand there.
int64_t RowBytes(const TensorView& tensor) {
  return kElementBytes * (tensor.size(0) > 1 ? tensor.stride(0) : tensor.size(1));
}

// Which rows that do not follow one another directly a module serves.
std::string Apart(int operand) {
  const int32_t alignment = gemm_payload.alignment[operand];
  if (gemm_payload.contiguous[operand]) return "";
  if (alignment == kElementBytes) return " or with rows farther apart, at most 2^31 - 1 elements";
  return " or with rows a multiple of " + std::to_string(alignment) + " bytes apart (" +
         std::to_string(alignment / kElementBytes) + " elements)";
}

bool HasDtype(const TensorView& tensor) {
  const DLDataType dtype = tensor.dtype();
  return dtype.code == (gemm_payload.is_bfloat16 ? kDLBfloat : kDLFloat) && dtype.bits == 16 && dtype.lanes == 1;
}

bool HasShape(const TensorView& tensor, int64_t rows, int64_t cols) {
  return tensor.ndim() == 2 && tensor.size(0) == rows && tensor.size(1) == cols;
}

bool HasWholeRows(const TensorView& tensor) { return tensor.size(1) == 1 || tensor.stride(1) == 1; }

bool HasCloseRows(const TensorView& tensor) { return RowBytes(tensor) == kElementBytes * tensor.size(1); }

bool IsAligned(int operand, const TensorView& tensor) {
  return reinterpret_cast<uintptr_t>(Address(tensor)) % static_cast<uintptr_t>(gemm_payload.alignment[operand]) == 0;
}

void CheckOperand(int operand, const TensorView& tensor, int64_t rows, int64_t cols) {
  const char* name = kNames[static_cast<size_t>(operand)];
  if (!HasDtype(tensor)) {
    TVM_FFI_THROW(TypeError) << name << " must be " << (gemm_payload.is_bfloat16 ? "bfloat16" : "float16");
  }
  if (tensor.device().device_type != kDLCUDA) {
    TVM_FFI_THROW(ValueError) << name << " must be on a CUDA device";
  }
  if (!HasShape(tensor, rows, cols)) {
    TVM_FFI_THROW(ValueError) << name << " must have shape (" << rows << ", " << cols << "), got " << ShapeText(tensor);
  }
  if (rows == 0 || cols == 0) return;
  const int32_t alignment = gemm_payload.alignment[operand];
  const int64_t row_bytes = RowBytes(tensor);
  const bool apart = row_bytes > kElementBytes * cols && row_bytes % alignment == 0 && row_bytes <= kMaxRowBytes;
  if (!HasWholeRows(tensor) || !(HasCloseRows(tensor) || (apart && !gemm_payload.contiguous[operand]))) {
    TVM_FFI_THROW(ValueError) << name << " must be row-major and contiguous" << Apart(operand) << ", got strides ("
                              << tensor.stride(0) << ", " << tensor.stride(1) << ")";
  }
  if (!IsAligned(operand, tensor)) {
    TVM_FFI_THROW(ValueError) << name << " must start at a " << alignment << "-byte aligned address";
  }
}

// ------------------------------------------------------------------------------------------------ device state

constexpr int kMaxDevices = 64;

struct DeviceState {
  std::once_flag once;
  CUcontext context = nullptr;
};

CUkernel LoadKernel() {
  CUlibrary library;
  Check(driver().library_load(&library, gemm_payload.cubin, nullptr, nullptr, 0, nullptr, nullptr, 0), "loading the kernel");
  CUkernel kernel;
  Check(driver().library_kernel(&kernel, library, gemm_payload.symbol), "finding the kernel");
  return kernel;
}

CUkernel kernel() {
  static const CUkernel instance = LoadKernel();
  return instance;
}

unsigned ClusterSize() {
  const GemmPayload& p = gemm_payload;
  return p.cluster[0] * p.cluster[1] * p.cluster[2];
}

// What every launch needs; the attribute lives as long as the caller keeps it.
CUlaunchConfig LaunchConfig(CUlaunchAttribute* cluster) {
  const GemmPayload& p = gemm_payload;
  *cluster = CUlaunchAttribute{};
  cluster->id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
  cluster->value.clusterDim.x = p.cluster[0];
  cluster->value.clusterDim.y = p.cluster[1];
  cluster->value.clusterDim.z = p.cluster[2];
  CUlaunchConfig config{};
  config.gridDimX = p.grid;
  config.gridDimY = config.gridDimZ = 1;
  config.blockDimX = p.threads;
  config.blockDimY = config.blockDimZ = 1;
  config.sharedMemBytes = p.smem_bytes;
  config.attrs = cluster;
  config.numAttrs = ClusterSize() > 1 ? 1 : 0;
  return config;
}

// CTAs of a cluster wait for one another, so a device that cannot hold them at once is refused here and not by a hang.
void RequireCluster(int ordinal, CUdevice device) {
  constexpr unsigned kPortableSize = 8;
  if (ClusterSize() > kPortableSize) {
    Check(driver().kernel_attribute(CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1, kernel(), device),
          "allowing a cluster of more than 8 CTAs");
  }
  CUlaunchAttribute cluster;
  const CUlaunchConfig config = LaunchConfig(&cluster);
  int clusters = 0;
  Check(driver().active_clusters(&clusters, reinterpret_cast<CUfunction>(kernel()), &config), "counting clusters");
  if (clusters < 1) {
    TVM_FFI_THROW(RuntimeError) << "device " << ordinal << " cannot hold a cluster of " << ClusterSize() << " CTAs with "
                                << gemm_payload.smem_bytes << " bytes of shared memory each at once";
  }
}

void PrepareDevice(int ordinal, DeviceState* state) {
  Check(driver().init(0), "initialising the driver");
  CUdevice device;
  Check(driver().device_get(&device, ordinal), "finding the device");
  int major = 0, minor = 0;
  Check(driver().device_attribute(&major, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device), "reading the device");
  Check(driver().device_attribute(&minor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, device), "reading the device");
  if (major != gemm_payload.capability_major || minor != gemm_payload.capability_minor) {
    TVM_FFI_THROW(RuntimeError) << "this module holds " << gemm_payload.arch << " code and runs on compute capability "
                                << gemm_payload.capability_major << "." << gemm_payload.capability_minor << " only; device "
                                << ordinal << " has " << major << "." << minor;
  }
  CUcontext context;
  Check(driver().primary_context_retain(&context, device), "opening the device");
  Check(driver().context_push(context), "entering the device's context");
  struct Leave {
    ~Leave() { driver().context_pop(nullptr); }
  } leave;
  Check(driver().kernel_attribute(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                                  static_cast<int>(gemm_payload.smem_bytes), kernel(), device),
        "reserving shared memory");
  if (ClusterSize() > 1) RequireCluster(ordinal, device);
  state->context = context;
}

CUcontext ContextOf(int ordinal) {
  static std::array<DeviceState, kMaxDevices> states;
  if (ordinal < 0 || ordinal >= kMaxDevices) {
    TVM_FFI_THROW(ValueError) << "device " << ordinal << " is out of range: at most " << kMaxDevices << " devices are served";
  }
  DeviceState& state = states[static_cast<size_t>(ordinal)];
  std::call_once(state.once, PrepareDevice, ordinal, &state);  // a throw leaves the flag unset: the next call tries again
  return state.context;
}

// Makes the device's context current for one launch. Frameworks usually have it current already.
class ContextGuard {
 public:
  explicit ContextGuard(CUcontext context) {
    CUcontext current = nullptr;
    Check(driver().context_current(&current), "reading the current context");
    if (current != context) {
      Check(driver().context_push(context), "entering the device's context");
      pushed_ = true;
    }
  }
  ~ContextGuard() {
    if (pushed_) driver().context_pop(nullptr);
  }
  ContextGuard(const ContextGuard&) = delete;
  ContextGuard& operator=(const ContextGuard&) = delete;

 private:
  bool pushed_ = false;
};

// ------------------------------------------------------------------------------------------------ workspace

// What only kernels with a workspace need of the driver. The capture query is that of CUDA 12, whose name a newer header
// gives to a function with one argument more.
struct WorkspaceDriver {
  CUresult (*capture_info)(CUstream, CUstreamCaptureStatus*, cuuint64_t*, CUgraph*, const CUgraphNode**, size_t*);
  CUresult (*stream_id)(CUstream, unsigned long long*);
  decltype(&cuThreadExchangeStreamCaptureMode) exchange_capture_mode;
  CUresult (*allocate)(CUdeviceptr*, size_t);
  decltype(&cuStreamCreate) stream_create;
  decltype(&cuStreamSynchronize) stream_synchronize;
  CUresult (*stream_destroy)(CUstream);
  decltype(&cuUserObjectCreate) user_object_create;
  decltype(&cuGraphRetainUserObject) graph_retain;
};

WorkspaceDriver LoadWorkspaceDriver() {
  void* library = OpenDriver();
  WorkspaceDriver d{};
  Resolve(library, "cuStreamGetCaptureInfo_v2", &d.capture_info);
  Resolve(library, "cuStreamGetId", &d.stream_id);
  Resolve(library, "cuThreadExchangeStreamCaptureMode", &d.exchange_capture_mode);
  Resolve(library, "cuMemAlloc_v2", &d.allocate);
  Resolve(library, "cuStreamCreate", &d.stream_create);
  Resolve(library, "cuStreamSynchronize", &d.stream_synchronize);
  Resolve(library, "cuStreamDestroy_v2", &d.stream_destroy);
  Resolve(library, "cuUserObjectCreate", &d.user_object_create);
  Resolve(library, "cuGraphRetainUserObject", &d.graph_retain);
  return d;
}

const WorkspaceDriver& workspace_driver() {
  static const WorkspaceDriver instance = LoadWorkspaceDriver();
  return instance;
}

// While it lives, this thread may do what is unsafe while some stream is being captured, such as to allocate.
class RelaxedCapture {
 public:
  RelaxedCapture() { Check(workspace_driver().exchange_capture_mode(&mode_), "relaxing the capture of a graph"); }
  ~RelaxedCapture() { workspace_driver().exchange_capture_mode(&mode_); }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  CUstreamCaptureMode mode_ = CU_STREAM_CAPTURE_MODE_RELAXED;
};

// New device memory, all zero, when this returns.
CUdeviceptr ZeroedMemory(size_t bytes) {
  const WorkspaceDriver& d = workspace_driver();
  RelaxedCapture relaxed;
  CUdeviceptr memory = 0;
  Check(d.allocate(&memory, bytes), "allocating the workspace");
  CUstream stream = nullptr;  // of its own: the caller's may be under capture
  Check(d.stream_create(&stream, CU_STREAM_NON_BLOCKING), "creating a stream");
  Check(driver().memset_all(memory, 0, bytes, stream), "clearing the workspace");
  Check(d.stream_synchronize(stream), "clearing the workspace");
  Check(d.stream_destroy(stream), "destroying a stream");
  return memory;
}

// Who may use a workspace: launches that follow one another. Those of one stream do, by its id, which is never used again;
// and those of one stream within one capture, by the capture's id and the stream's handle: the id of a stream that is
// being captured cannot be read (cuStreamGetId fails and ends the capture, driver 580.159).
using Owner = std::tuple<bool, cuuint64_t, unsigned long long>;  // whether captured, capture, stream

Owner OwnerOf(CUstream stream, CUgraph* graph) {
  const WorkspaceDriver& d = workspace_driver();
  RelaxedCapture relaxed;  // another thread may be capturing another stream
  CUstreamCaptureStatus status;
  cuuint64_t capture = 0;
  Check(d.capture_info(stream, &status, &capture, graph, nullptr, nullptr), "asking whether the stream is captured");
  if (status != CU_STREAM_CAPTURE_STATUS_NONE) return {true, capture, reinterpret_cast<uintptr_t>(stream)};
  unsigned long long id = 0;
  Check(d.stream_id(stream, &id), "reading the stream's id");
  return {false, 0, id};
}

// The workspaces of one device. A kernel finds zeros where it needs them and leaves zeros, so memory goes from owner to
// owner as it is. It is kept for as long as the process lives.
class Workspaces {
 public:
  CUdeviceptr Of(CUstream stream) {
    CUgraph graph = nullptr;
    const Owner owner = OwnerOf(stream, &graph);
    if (const CUdeviceptr memory = Find(owner)) return memory;
    CUdeviceptr memory = TakeSpare();
    if (memory == 0) memory = ZeroedMemory(gemm_payload.workspace_bytes);
    const CUdeviceptr kept = Keep(owner, memory);
    if (std::get<0>(owner) && kept == memory) GiveBackWith(graph, owner);
    return kept;
  }

 private:
  struct Loan {
    Workspaces* lender;
    Owner owner;
  };

  CUdeviceptr Find(const Owner& owner) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto place = of_owner_.find(owner);
    return place == of_owner_.end() ? 0 : place->second;
  }

  CUdeviceptr TakeSpare() {
    std::lock_guard<std::mutex> lock(mutex_);
    if (spare_.empty()) return 0;
    const CUdeviceptr memory = spare_.back();
    spare_.pop_back();
    return memory;
  }

  // Another thread may have been quicker for the same stream.
  CUdeviceptr Keep(const Owner& owner, CUdeviceptr memory) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto [place, added] = of_owner_.emplace(owner, memory);
    if (!added) spare_.push_back(memory);
    return place->second;
  }

  // When the graph and all that was instantiated from it are gone, and have run to their end.
  void GiveBackWith(CUgraph graph, const Owner& owner) {
    StayLoaded();
    CUuserObject object;
    Check(workspace_driver().user_object_create(&object, new Loan{this, owner}, &Workspaces::GiveBack, 1,
                                                CU_USER_OBJECT_NO_DESTRUCTOR_SYNC),
          "tying the workspace to the graph");
    Check(workspace_driver().graph_retain(graph, object, 1, CU_GRAPH_USER_OBJECT_MOVE), "tying the workspace to the graph");
  }

  // Called by the driver, which allows no calls to it here.
  static void CUDA_CB GiveBack(void* loan) {
    const auto* lent = static_cast<Loan*>(loan);
    Workspaces& lender = *lent->lender;
    {
      std::lock_guard<std::mutex> lock(lender.mutex_);
      const auto place = lender.of_owner_.find(lent->owner);
      lender.spare_.push_back(place->second);
      lender.of_owner_.erase(place);
    }
    delete lent;
  }

  // A graph may outlive every reference to this module, and calls GiveBack when it goes.
  static void StayLoaded() {
    Dl_info self;
    static const bool done = dladdr(reinterpret_cast<void*>(&Workspaces::GiveBack), &self) != 0 &&
                             dlopen(self.dli_fname, RTLD_NOW | RTLD_NOLOAD | RTLD_NODELETE) != nullptr;
    if (!done) TVM_FFI_THROW(RuntimeError) << "cannot keep this module loaded for the graph that is being captured";
  }

  std::mutex mutex_;
  std::map<Owner, CUdeviceptr> of_owner_;
  std::vector<CUdeviceptr> spare_;
};

Workspaces& WorkspacesOf(int ordinal) {
  static auto* const instances = new std::array<Workspaces, kMaxDevices>;  // graphs may be destroyed after statics
  return (*instances)[static_cast<size_t>(ordinal)];
}

// ------------------------------------------------------------------------------------------------ launch

// row_bytes: distance of rows, 0 for that of the plan; rows: of the operand in the call.
void Encode(const GemmParameter& plan, char* address, int64_t row_bytes, int64_t rows, CUtensorMap* map) {
  std::array<uint64_t, GEMM_MAX_RANK> strides, extents;
  std::array<uint32_t, GEMM_MAX_RANK> box;
  std::copy(std::begin(plan.strides), std::end(plan.strides), strides.begin());
  std::copy(std::begin(plan.extents), std::end(plan.extents), extents.begin());
  std::copy(std::begin(plan.box), std::end(plan.box), box.begin());
  if (row_bytes != 0) strides[0] = static_cast<uint64_t>(row_bytes);
  if (plan.rows_from_call) extents[1] = static_cast<uint64_t>(rows);
  if (plan.short_box) box[1] = static_cast<uint32_t>(std::min<int64_t>(box[1], rows));
  Check(driver().encode_tiled(map, static_cast<CUtensorMapDataType>(plan.data_type), plan.rank, address, extents.data(),
                              strides.data(), box.data(), plan.element_strides,
                              static_cast<CUtensorMapInterleave>(plan.interleave),
                              static_cast<CUtensorMapSwizzle>(plan.swizzle),
                              static_cast<CUtensorMapL2promotion>(plan.l2_promotion),
                              static_cast<CUtensorMapFloatOOBfill>(plan.oob_fill)),
        "describing an operand to the copy engine");
}

void Launch(const std::array<TensorView, 3>& operands, CUstream stream, int ordinal) {
  const GemmPayload& p = gemm_payload;
  CUdeviceptr workspace = p.workspace_bytes == 0 ? 0 : WorkspacesOf(ordinal).Of(stream);
  std::array<char*, 3> addresses;
  alignas(64) std::array<CUtensorMap, GEMM_MAX_PARAMETERS> maps;
  std::array<int32_t, 3> strides;
  auto rows = static_cast<int32_t>(operands[GEMM_A].size(0));
  std::array<void*, GEMM_MAX_PARAMETERS> arguments;
  for (size_t i = 0; i < operands.size(); ++i) addresses[i] = Address(operands[i]);
  for (size_t i = 0; i < static_cast<size_t>(p.parameter_count); ++i) {
    const GemmParameter& parameter = p.parameters[i];
    const auto operand = static_cast<size_t>(parameter.operand);
    if (parameter.kind == GEMM_TENSOR_MAP) {
      const TensorView& tensor = operands[operand];
      const bool own_stride = !p.contiguous[operand] && tensor.size(0) > 1;
      Encode(parameter, addresses[operand], own_stride ? RowBytes(tensor) : 0, tensor.size(0), &maps[i]);
      arguments[i] = &maps[i];
    } else if (parameter.kind == GEMM_ROWS) {
      arguments[i] = &rows;
    } else if (parameter.kind == GEMM_WORKSPACE) {
      arguments[i] = &workspace;
    } else if (parameter.kind == GEMM_STRIDE) {
      strides[operand] = static_cast<int32_t>(RowBytes(operands[operand]) / kElementBytes);
      arguments[i] = &strides[operand];
    } else {
      arguments[i] = &addresses[operand];
    }
  }
  CUlaunchAttribute cluster;
  CUlaunchConfig config = LaunchConfig(&cluster);
  config.hStream = stream;
  Check(driver().launch(&config, reinterpret_cast<CUfunction>(kernel()), arguments.data(), nullptr), "launching the kernel");
}

// A product of no terms is zero.
void Clear(const TensorView& d, CUstream stream) {
  const auto start = reinterpret_cast<CUdeviceptr>(Address(d));
  const auto width = static_cast<size_t>(kElementBytes * d.size(1)), rows = static_cast<size_t>(d.size(0));
  if (static_cast<size_t>(RowBytes(d)) == width) {  // rows may be longer than the distance that the other call takes
    Check(driver().memset_all(start, 0, width * rows, stream), "clearing D");
  } else {
    Check(driver().memset_rows(start, static_cast<size_t>(RowBytes(d)), 0, width, rows, stream), "clearing D");
  }
}

void Gemm(TensorView a, TensorView b, TensorView d) {
  const Extents extents = ExtentsOf(a, b);
  CheckOperand(GEMM_A, a, extents.m, extents.k);
  CheckOperand(GEMM_B, b, extents.n, extents.k);
  CheckOperand(GEMM_D, d, extents.m, extents.n);
  const int ordinal = a.device().device_id;
  if (b.device().device_id != ordinal || d.device().device_id != ordinal) {
    TVM_FFI_THROW(ValueError) << "A, B and D must be on one device";
  }
  if (extents.m == 0 || extents.n == 0) return;
  ContextGuard guard(ContextOf(ordinal));
  const auto stream = static_cast<CUstream>(TVMFFIEnvGetStream(kDLCUDA, ordinal));
  if (extents.k == 0) {
    Clear(d, stream);
  } else {
    Launch({a, b, d}, stream, ordinal);
  }
}

// A matrix with its axes swapped, over the same memory.
class Transposed {
 public:
  explicit Transposed(const TensorView& matrix)
      : shape_{matrix.size(1), matrix.size(0)}, strides_{matrix.stride(1), matrix.stride(0)} {
    view_.data = matrix.data_ptr();
    view_.device = matrix.device();
    view_.ndim = 2;
    view_.dtype = matrix.dtype();
    view_.shape = shape_.data();
    view_.strides = strides_.data();
    view_.byte_offset = matrix.byte_offset();
  }
  Transposed(const Transposed&) = delete;
  Transposed& operator=(const Transposed&) = delete;
  TensorView view() const { return TensorView(&view_); }

 private:
  std::array<int64_t, 2> shape_, strides_;
  DLTensor view_{};
};

bool IsContiguous(int operand, const TensorView& tensor, int64_t rows, int64_t cols) {
  return HasDtype(tensor) && tensor.device().device_type == kDLCUDA && HasShape(tensor, rows, cols) &&
         HasWholeRows(tensor) && HasCloseRows(tensor) && IsAligned(operand, tensor);
}

// a (M, K) @ b (K, N), both as a caller of torch.matmul holds them, into a tensor of the caller's framework. Nothing, and
// no error, unless this module serves them: a contiguous, and b the transpose of a contiguous matrix.
tvm::ffi::Optional<tvm::ffi::Tensor> Product(TensorView a, TensorView b) {
  const GemmPayload& p = gemm_payload;
  if (a.ndim() != 2 || b.ndim() != 2) return std::nullopt;
  const int64_t m = p.dynamic_m ? a.size(0) : p.m;
  const Transposed weight(b);
  if (m < 1 || m > kMaxRows || !IsContiguous(GEMM_A, a, m, p.k) || !IsContiguous(GEMM_B, weight.view(), p.n, p.k) ||
      a.device().device_id != b.device().device_id) {
    return std::nullopt;
  }
  const std::array<int64_t, 2> shape = {m, p.n};
  tvm::ffi::Tensor d = tvm::ffi::Tensor::FromEnvAlloc(
      TVMFFIEnvTensorAlloc, tvm::ffi::ShapeView(shape.data(), shape.size()), a.dtype(), a.device());
  Gemm(a, weight.view(), d);
  return d;
}

// ------------------------------------------------------------------------------------------------ routes

// Which module serves a product, of all modules of a process that one of them was told of: a package with many kernels
// asks it with one call, and no table is looked into in Python. The answer has to be quick, so what is there stays.
class Routes {
 public:
  using Key = std::tuple<int64_t, int64_t, int64_t, bool, int>;  // M, N, K, whether bfloat16, device

  void Add(const Key& key, tvm::ffi::Function product) {
    std::unique_lock<std::shared_mutex> lock(mutex_);
    products_.emplace(key, std::move(product));
  }

  const tvm::ffi::Function* Find(const Key& key) {
    std::shared_lock<std::shared_mutex> lock(mutex_);
    const auto place = products_.find(key);
    return place == products_.end() ? nullptr : &place->second;  // nothing is ever taken out
  }

 private:
  std::shared_mutex mutex_;
  std::map<Key, tvm::ffi::Function> products_;
};

Routes& routes() {
  static auto* const instance = new Routes;  // functions of modules must not be destroyed after their runtime
  return *instance;
}

// From now on Route(a, b) of these extents, dtype and device is product(a, b), a function of this or of another module.
void AddRoute(int64_t m, int64_t n, int64_t k, bool is_bfloat16, int64_t ordinal, tvm::ffi::Function product) {
  routes().Add({m, n, k, is_bfloat16, static_cast<int>(ordinal)}, std::move(product));
}

// a (M, K) @ b (K, N) by the module that was named for it. Nothing, and no error, where none was or where it does not
// serve how they lie in memory.
tvm::ffi::Optional<tvm::ffi::Tensor> Route(TensorView a, TensorView b) {
  const DLDataType dtype = a.dtype();
  if (a.ndim() != 2 || b.ndim() != 2 || dtype.bits != 16 || a.device().device_type != kDLCUDA) return std::nullopt;
  const tvm::ffi::Function* product =
      routes().Find({a.size(0), b.size(1), a.size(1), dtype.code == kDLBfloat, a.device().device_id});
  if (product == nullptr) return std::nullopt;
  return (*product)(a, b).cast<tvm::ffi::Optional<tvm::ffi::Tensor>>();
}

tvm::ffi::String Describe() { return tvm::ffi::String(gemm_payload.description); }

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(gemm, Gemm);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(product, Product);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(add_route, AddRoute);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(route, Route);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(describe, Describe);
