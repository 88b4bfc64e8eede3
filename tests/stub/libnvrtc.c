/* A stand-in for libnvrtc: programs that compile to eight bytes, for tests/stub/libcuda.c, which looks at no code. */
#include <stdlib.h>
#include <string.h>

int nvrtcVersion(int *major, int *minor) { *major = 13; *minor = 0; return 0; }
int nvrtcCreateProgram(void **program, const char *source, const char *name, int headers, const char *const *texts, const char *const *names) {
    (void)name, (void)headers, (void)texts, (void)names;
    *program = malloc(1);
    return source && *source ? 0 : 3;
}
int nvrtcCompileProgram(void *program, int count, const char *const *options) {
    (void)program;
    for (int i = 0; i < count; i++) if (strncmp(options[i], "--gpu-architecture=sm_", 22)) return 5;
    return 0;
}
int nvrtcGetCUBINSize(void *program, size_t *bytes) { (void)program; *bytes = 8; return 0; }
int nvrtcGetCUBIN(void *program, char *image) { (void)program; memcpy(image, "compiled", 8); return 0; }
int nvrtcGetProgramLogSize(void *program, size_t *bytes) { (void)program; *bytes = 1; return 0; }
int nvrtcGetProgramLog(void *program, char *log) { (void)program; *log = 0; return 0; }
int nvrtcDestroyProgram(void **program) { free(*program); *program = NULL; return 0; }
const char *nvrtcGetErrorString(int status) { return status ? "NVRTC_ERROR" : "NVRTC_SUCCESS"; }
