#include "common/base/errors/not_finite.h"

#include <gtest/gtest.h>

#include "common/base/errors/error.h"

namespace tandem {
namespace {

TEST(NotFiniteTest, TheErrorIsToldApartUnderAnyPath) {
  const absl::Status status = PrependFieldPath("samples[0]", NotFiniteError("the value"));
  EXPECT_EQ(status.code(), absl::StatusCode::kInternal);
  EXPECT_EQ(status.message(), "samples[0]: the value");
  EXPECT_TRUE(IsNotFinite(status));
  EXPECT_FALSE(IsNotFinite(absl::InternalError("the value")));
  EXPECT_FALSE(IsNotFinite(absl::OkStatus()));
}

}  // namespace
}  // namespace tandem
