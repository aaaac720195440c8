#include "common/rpc/open_streams.h"

#include <gtest/gtest.h>

#include <atomic>
#include <memory>

#include "absl/time/clock.h"
#include "common/base/error.h"

namespace tandem::rpc {
namespace {

OpenStreams::Stream Idle() {
  return {.waits_since = [] { return absl::InfiniteFuture(); }, .give_up = [] {}};
}

TEST(OpenStreamsTest, OneMoreThanThereMayBeIsRefusedUntilAPlaceIsFree) {
  OpenStreams streams({.max_streams = 2, .patience = absl::Minutes(1)});
  auto first = streams.Enter(Idle());
  auto second = streams.Enter(Idle());
  ASSERT_TRUE(first.ok() && second.ok());
  const absl::Status refused = streams.Enter(Idle()).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_TRUE(RetryAfterMilliseconds(refused).has_value());
  first->reset();
  EXPECT_TRUE(streams.Enter(Idle()).ok());
}

TEST(OpenStreamsTest, AStreamThatIsNotReadIsGivenUpOnceAndOnlyThatOne) {
  OpenStreams streams({.patience = absl::Milliseconds(50)});
  std::atomic<int> stalled = 0, lively = 0;
  const absl::Time long_ago = absl::Now() - absl::Hours(1);
  auto first = streams.Enter({[&] { return long_ago; }, [&] { ++stalled; }});
  auto second = streams.Enter({[] { return absl::Now(); }, [&] { ++lively; }});
  auto third = streams.Enter({[] { return absl::InfiniteFuture(); }, [&] { ++lively; }});
  for (int i = 0; i < 2000 && stalled == 0; ++i) absl::SleepFor(absl::Milliseconds(10));
  absl::SleepFor(absl::Milliseconds(100));  // several looks
  EXPECT_EQ(stalled, 1);
  EXPECT_EQ(lively, 0);
}

}  // namespace
}  // namespace tandem::rpc
