// Memory of a GPU that another process of the machine may read, described for that process
// (common/tensor/aten/peer_memory.h).
#ifndef TANDEM_COMMON_BASE_MACHINE_GPU_MEMORY_H_
#define TANDEM_COMMON_BASE_MACHINE_GPU_MEMORY_H_

#include <cstdint>
#include <string>

namespace tandem {

struct GpuMemory {
  std::string machine = {};  // MachineId() of its process
  std::string gpu = {};      // UUID of the GPU
  std::string handle = {};   // by which another process opens it
  int64_t offset = 0;        // of the first byte in what the handle opens
  int64_t size = 0;          // bytes
};

// Returns an id that the processes of this machine share, in every container, and no other machine
// has: the kernel's boot id; empty if it cannot be read.
const std::string& MachineId();

}  // namespace tandem

#endif  // TANDEM_COMMON_BASE_MACHINE_GPU_MEMORY_H_
