// A CUDA driver that only notes what a module asks of it, for tests of the launcher without a GPU.
//
// Streams are numbers. Bits 0-15 are the stream's id, bits 16-31 the graph that it is being captured into, 0 for none.
// A stream is under capture from its first launch with a graph on; FAKE_DRIVER_CAPTURE says that another thread captures
// all the while. What the real driver refuses then, and ends the capture for, is refused here too. Calls that matter are
// written to standard error, one line each.
#include <stdio.h>
#include <stdlib.h>

typedef unsigned long long u64;
typedef void (*destructor)(void*);

static u64 next_address = 1ull << 40;
static struct { u64 graph; void* data; destructor destroy; } retained[64];
static int retained_count;
static struct { void* data; destructor destroy; } latest;

#define OK(name) int name() { return 0; }
OK(cuInit) OK(cuGetErrorName) OK(cuGetErrorString) OK(cuDevicePrimaryCtxRetain) OK(cuCtxPushCurrent_v2)
OK(cuCtxPopCurrent_v2) OK(cuLibraryLoadData) OK(cuKernelSetAttribute) OK(cuTensorMapEncodeTiled)
OK(cuStreamDestroy_v2)

#define CAPTURE_UNSUPPORTED 900
#define RELAXED 2
static int mode, capturing;  // of this thread; whether a stream of it is under capture
static int unsafe() { return mode != RELAXED && (capturing || getenv("FAKE_DRIVER_CAPTURE")) ? CAPTURE_UNSUPPORTED : 0; }

int cuThreadExchangeStreamCaptureMode(int* exchanged) {
  int before = mode;
  mode = *exchanged, *exchanged = before;
  return 0;
}
int cuStreamSynchronize(u64 stream) { return stream >> 16 && stream != 0xFFFF ? CAPTURE_UNSUPPORTED : 0; }

int cuDeviceGet(int* device, int ordinal) { *device = ordinal; return 0; }
int cuDeviceGetAttribute(int* value, int attribute, int device) {
  *value = attribute == 75 ? 9 : 0;  // compute capability 9.0
  return 0;
}
int cuCtxGetCurrent(void** context) { *context = 0; return 0; }
int cuLibraryGetKernel(void** kernel) { *kernel = (void*)1; return 0; }
int cuOccupancyMaxActiveClusters(int* clusters) { *clusters = 1; return 0; }
int cuStreamCreate(u64* stream, unsigned flags) { *stream = 0xFFFF; return 0; }

int cuMemsetD2D8Async(u64 start, u64 pitch, unsigned char value, u64 width, u64 rows, u64 stream) {
  fprintf(stderr, "clear %llu rows of %llu bytes, %llu apart\n", rows, width, pitch);
  return 0;
}
int cuMemsetD8Async(u64 start, unsigned char value, u64 bytes, u64 stream) {
  fprintf(stderr, "clear %llu bytes%s\n", bytes, stream == 0xFFFF ? " on a stream of its own" : "");
  return 0;
}
int cuMemAlloc_v2(u64* address, u64 bytes) {
  if (unsafe()) return CAPTURE_UNSUPPORTED;
  *address = next_address;
  next_address += 1ull << 32;
  fprintf(stderr, "allocate %llu bytes\n", bytes);
  return 0;
}
int cuLaunchKernelEx(void* config, void* function, void** arguments, void** extra) {
  const char* place = getenv("FAKE_DRIVER_WORKSPACE_ARGUMENT");
  if (place) {
    fprintf(stderr, "launch with workspace %llu\n", (*(u64*)arguments[atoi(place)] - (1ull << 40)) >> 32);
  } else {
    fprintf(stderr, "launch\n");
  }
  return 0;
}

int cuStreamGetCaptureInfo_v2(u64 stream, int* status, u64* id, u64* graph, void* dependencies, void* count) {
  *graph = *id = stream >> 16 & 0xFFFF;
  *status = capturing = *graph != 0;
  return 0;
}
int cuStreamGetId(u64 stream, u64* id) {
  *id = stream & 0xFFFF;
  return stream >> 16 ? CAPTURE_UNSUPPORTED : unsafe();  // of a captured stream in no mode
}
int cuUserObjectCreate(void** object, void* data, destructor destroy, unsigned count, unsigned flags) {
  latest.data = data, latest.destroy = destroy;
  *object = &latest;
  return 0;
}
int cuGraphRetainUserObject(u64 graph, void* object, unsigned count, unsigned flags) {
  retained[retained_count].graph = graph, retained[retained_count].data = latest.data;
  retained[retained_count++].destroy = latest.destroy;
  return 0;
}

// For the test: a graph and all that was instantiated from it are gone.
void destroy_graph(u64 graph) {
  for (int i = 0; i < retained_count; ++i) {
    if (retained[i].graph == graph && retained[i].destroy) retained[i].destroy(retained[i].data), retained[i].destroy = 0;
  }
}
