// The CUDA kernels of DeviceKernels: raw device pointers and a stream, no torch header.
#ifndef TANDEM_COMMON_KERNELS_CUDA_CUDA_KERNELS_H_
#define TANDEM_COMMON_KERNELS_CUDA_CUDA_KERNELS_H_

#include "common/kernels/device_kernels.h"

namespace tandem::kernels {

const char* RmsNormCuda(const DeviceRmsNormArgs& args, DeviceStream stream);
const char* RotaryCuda(const DeviceRotaryArgs& args, DeviceStream stream);
const char* GatedCuda(const DeviceGatedArgs& args, DeviceStream stream);
const char* GroupedLinearCuda(const DeviceGroupedLinearArgs& args, DeviceStream stream);
const char* GroupedGradientCuda(const DeviceGroupedGradientArgs& args, DeviceStream stream);
const char* CacheWriteCuda(const DeviceCacheWriteArgs& args, DeviceStream stream);
const char* PagedAttentionCuda(const DevicePagedAttentionArgs& args, DeviceStream stream);
const char* FoldPartialsCuda(const DevicePagedAttentionArgs& args, DeviceStream stream);
const char* LogitStatisticsCuda(const DeviceLogitStatisticsArgs& args, DeviceStream stream);
const char* LogitGradientCuda(const DeviceLogitGradientArgs& args, DeviceStream stream);
bool HasGroupedMmCuda(int device);

}  // namespace tandem::kernels

#endif  // TANDEM_COMMON_KERNELS_CUDA_CUDA_KERNELS_H_
