#include "common/ranks/rank_agreement.h"

#include <gtest/gtest.h>

#include <memory>
#include <stdexcept>
#include <string>

#include "common/base/errors/error.h"
#include "common/ranks/testing/rank_processes.h"

namespace tandem::ranks {
namespace {

using Ranks = std::shared_ptr<Communicator>;

TEST(RankAgreementTest, TheErrorOfTheLowestRankIsThatOfAll) {
  RunConnected(3, [](const Ranks& ranks) {
    EXPECT_TRUE(Agree(*ranks, absl::OkStatus()).ok());
    const absl::Status own = ranks->rank() == 0
                                 ? absl::OkStatus()
                                 : InvalidField("field", absl::StrCat("rank ", ranks->rank()));
    EXPECT_EQ(Agree(*ranks, own), InvalidField("field", "rank 1"));
  });
}

TEST(RankAgreementTest, RankZeroAloneComputes) {
  RunConnected(3, [](const Ranks& ranks) {
    int calls = 0;
    const auto compute = [&](const absl::StatusOr<std::string>& result) {
      return FromRankZero<std::string>(*ranks, [&] {
        ++calls;
        return result;
      });
    };
    EXPECT_EQ(compute(std::string("a\0b", 3)).value(), std::string("a\0b", 3));
    EXPECT_EQ(compute(absl::NotFoundError("none")).status(), absl::NotFoundError("none"));
    EXPECT_EQ(calls, ranks->rank() == 0 ? 2 : 0);
    EXPECT_EQ(
        FromRankZero<int64_t>(
            *ranks, []() -> absl::StatusOr<int64_t> { throw std::runtime_error("unforeseen"); })
            .status()
            .code(),
        absl::StatusCode::kInternal);
  });
}

}  // namespace
}  // namespace tandem::ranks
