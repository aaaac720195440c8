// How many threads a compute-bound pool should have.
#ifndef TANDEM_COMMON_BASE_PHYSICAL_CORES_H_
#define TANDEM_COMMON_BASE_PHYSICAL_CORES_H_

namespace tandem {

// Physical cores that this process may run on (its affinity mask, hyper-threads counted once); at
// least 1.
int PhysicalCores();

}  // namespace tandem

#endif  // TANDEM_COMMON_BASE_PHYSICAL_CORES_H_
