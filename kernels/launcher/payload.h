// What one kernel hands to the launcher. Filled by a generated C file, one per kernel; read by launcher.cc.
#ifndef GEMM_TUNER_PAYLOAD_H_
#define GEMM_TUNER_PAYLOAD_H_

#include <stdint.h>

#define GEMM_MAX_RANK 5
#define GEMM_MAX_PARAMETERS 8

#ifdef __cplusplus
extern "C" {
#endif

enum GemmOperand { GEMM_A = 0, GEMM_B = 1, GEMM_D = 2 };
enum GemmParameterKind {
  GEMM_TENSOR_MAP = 0,
  GEMM_POINTER = 1,
  GEMM_STRIDE = 2,
  GEMM_ROWS = 3,
  GEMM_WORKSPACE = 4,
};

// One kernel parameter: a tensor map over an operand (the fields of cuTensorMapEncodeTiled), the operand's address,
// the distance of two of its rows in elements, as an int32, M, as an int32, or the address of the workspace.
struct GemmParameter {
  int32_t kind;
  int32_t operand;
  int32_t data_type;
  uint32_t rank;
  uint64_t extents[GEMM_MAX_RANK];  // elements, innermost first
  uint64_t strides[GEMM_MAX_RANK];  // bytes, of dimensions 1 .. rank-1
  uint32_t box[GEMM_MAX_RANK];
  uint32_t element_strides[GEMM_MAX_RANK];
  int32_t interleave;
  int32_t swizzle;
  int32_t l2_promotion;
  int32_t oob_fill;
  int32_t rows_from_call;  // extents[1] is that of the operand in the call
  int32_t short_box;       // box[1] is at most that
};

struct GemmPayload {
  const char* description;  // JSON: problem, config, arch, sm_count, source hash
  const char* symbol;       // kernel name inside the cubin
  const unsigned char* cubin;
  const char* arch;  // "sm_90a"
  int32_t capability_major;
  int32_t capability_minor;
  int64_t m, n, k;
  int32_t dynamic_m;  // m is an example: M is that of the call
  int32_t is_bfloat16;  // else float16
  uint32_t grid;
  uint32_t threads;
  uint32_t cluster[3];
  uint32_t smem_bytes;
  uint64_t workspace_bytes;  // device memory that a launch needs beside its operands
  int32_t contiguous[3];  // whether A, B, D must be: the kernel knows their row stride
  int32_t alignment[3];   // bytes: of the start of A, B, D and of the distance of their rows
  int32_t parameter_count;
  struct GemmParameter parameters[GEMM_MAX_PARAMETERS];
};

extern const struct GemmPayload gemm_payload;

#ifdef __cplusplus
}
#endif

#endif  // GEMM_TUNER_PAYLOAD_H_
