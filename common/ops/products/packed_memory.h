// The memory of packed weights. A product of few rows reads it once and computes little, so that
// the translation of its addresses counts: with pages of 4 KiB it takes up to a third of the time.
#ifndef TANDEM_COMMON_OPS_PRODUCTS_PACKED_MEMORY_H_
#define TANDEM_COMMON_OPS_PRODUCTS_PACKED_MEMORY_H_

#include <cstdint>
#include <memory>

namespace tandem::ops {

// Returns `bytes` of zeros at a multiple of 64. Consecutive calls take them from one region, for
// which Linux is asked for huge pages (transparent_hugepage/enabled: `madvise` or `always`; with
// `never` the pages are small). A region whose takers have all released theirs is kept for later
// calls, because new weights take as much as the old ones gave back, and pages that come from the
// system cost more than packing; but never more bytes than are taken. Thread-safe. Throws
// std::bad_alloc.
std::shared_ptr<void> AllocatePacked(int64_t bytes);

}  // namespace tandem::ops

#endif  // TANDEM_COMMON_OPS_PRODUCTS_PACKED_MEMORY_H_
