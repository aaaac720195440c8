#include "common/base/machine/gpu_memory.h"

#include <fstream>

namespace tandem {

const std::string& MachineId() {
  static const std::string& id = *[] {
    auto* const read = new std::string;
    std::ifstream("/proc/sys/kernel/random/boot_id") >> *read;
    return read;
  }();
  return id;
}

}  // namespace tandem
