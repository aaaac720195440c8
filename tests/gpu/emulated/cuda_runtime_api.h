#include "tests/gpu/emulated/cuda_runtime.h"
