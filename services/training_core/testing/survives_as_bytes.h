// Requests with images, as other ranks get them (common/base/struct_bytes.h).
#ifndef TANDEM_SERVICES_TRAINING_CORE_TESTING_SURVIVES_AS_BYTES_H_
#define TANDEM_SERVICES_TRAINING_CORE_TESTING_SURVIVES_AS_BYTES_H_

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "common/base/struct_bytes.h"
#include "common/base/testing/no_defaults.h"
#include "common/tensor/vision_reference.h"

namespace tandem::training {

inline std::vector<VisionReference> SomeImages() {
  return {{.is_video = true,
           .digest = "pixels",
           .grid_t = 1,
           .grid_h = 2,
           .grid_w = 4,
           .seconds_per_grid = 0.5,
           .first_token = 7}};
}

inline Blobs SomeBlobs() { return {{"pixels", std::make_shared<const std::string>("bytes")}}; }

// Expects that every field of the request, none of which has its default, is read back.
template <typename T>
void ExpectSurvives(const T& request) {
  ExpectNoDefaults(request);
  T read = FromBytes<T>(ToBytes(request)).value();
  // Requests hold blobs by pointer, so that == does not compare their bytes.
  ASSERT_EQ(read.blobs.size(), request.blobs.size());
  for (const auto& [digest, blob] : request.blobs) EXPECT_EQ(*read.blobs.at(digest), *blob);
  read.blobs = request.blobs;
  EXPECT_EQ(read, request);
}

}  // namespace tandem::training

#endif  // TANDEM_SERVICES_TRAINING_CORE_TESTING_SURVIVES_AS_BYTES_H_
