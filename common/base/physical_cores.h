// The number of physical cores, which is the size of a compute-bound thread pool.
#ifndef TANDEM_COMMON_BASE_PHYSICAL_CORES_H_
#define TANDEM_COMMON_BASE_PHYSICAL_CORES_H_

namespace tandem {

// Returns the number of physical cores that this process may run on (its affinity mask,
// hyper-threads counted once); at least 1.
int PhysicalCores();

}  // namespace tandem

#endif  // TANDEM_COMMON_BASE_PHYSICAL_CORES_H_
