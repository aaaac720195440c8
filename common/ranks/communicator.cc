#include "common/ranks/communicator.h"

#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/base/errors/status_macros.h"
#include "common/base/steady_time.h"
#include "common/ranks/deadline.h"
#include "common/ranks/transport/c10d_transport.h"

namespace tandem::ranks {
namespace {

// Tags keep the sends of the collectives apart from those of the callers.
constexpr int kSendTag = 0;
constexpr int kReduceScatterTag = 1;
constexpr int kAllGatherTag = 2;
constexpr int kAllToAllTag = 3;

// Size of the first exchange of a broadcast of bytes; most commands fit into it.
constexpr size_t kHeadBytes = 4096;

at::Tensor ToTensor(const std::string& bytes) {
  at::Tensor tensor = at::empty({static_cast<int64_t>(bytes.size())}, at::kByte);
  if (!bytes.empty()) std::memcpy(tensor.mutable_data_ptr(), bytes.data(), bytes.size());
  return tensor;
}

std::string ToBytes(const at::Tensor& tensor, int64_t length) {
  const at::Tensor on_host = tensor.cpu();
  return {static_cast<const char*>(on_host.const_data_ptr()), static_cast<size_t>(length)};
}

// The type in which sums of `type` are taken.
at::ScalarType SumType(absl::string_view what, at::ScalarType type) {
  if (type == at::kBFloat16) return at::kFloat;
  TORCH_CHECK(type == at::kFloat || type == at::kDouble || type == at::kLong, what,
              " takes float32, float64, int64 or bfloat16, not ", type);
  return type;
}

// Returns views of consecutive rows of `tensor`, counts[i] in the i-th.
std::vector<at::Tensor> RowRanges(absl::string_view what, const at::Tensor& tensor,
                                  const std::vector<int64_t>& counts) {
  const int64_t rows = std::accumulate(counts.begin(), counts.end(), int64_t{0});
  TORCH_CHECK(tensor.dim() > 0 && tensor.size(0) == rows, what, ": ", tensor.sizes(),
              " does not have ", rows, " rows");
  return at::split_with_sizes(tensor, counts, 0);
}

// Waits until all ranks have joined at the store. The error names the missing ones.
absl::Status AwaitAll(RankStore& store, const RankEnvironment& environment, SteadyTime deadline) {
  std::vector<std::string> keys;
  for (int rank = 0; rank < environment.world_size; ++rank) {
    keys.push_back(absl::StrCat("joined/", rank));
  }
  store.Set(keys[environment.rank], "");
  if (store.WaitFor(keys, deadline - SteadyTime::Now())) return absl::OkStatus();
  std::vector<int> missing;
  for (int rank = 0; rank < environment.world_size; ++rank) {
    if (!store.Has(keys[rank])) missing.push_back(rank);
  }
  return absl::UnavailableError(
      absl::StrCat("rank ", absl::StrJoin(missing, ", "), " did not join in time"));
}

}  // namespace

namespace {

// All kinds, `receive` included.
constexpr CollectiveVolume CommunicationVolume::*kKinds[] = {
    &CommunicationVolume::all_reduce, &CommunicationVolume::reduce_scatter,
    &CommunicationVolume::all_gather, &CommunicationVolume::broadcast,
    &CommunicationVolume::all_to_all, &CommunicationVolume::send,
    &CommunicationVolume::plain_data, &CommunicationVolume::receive};

}  // namespace

CommunicationVolume& CommunicationVolume::operator+=(const CommunicationVolume& other) {
  for (const auto kind : kKinds) {
    (this->*kind).calls += (other.*kind).calls;
    (this->*kind).bytes += (other.*kind).bytes;
  }
  return *this;
}

CommunicationVolume& CommunicationVolume::operator-=(const CommunicationVolume& other) {
  for (const auto kind : kKinds) {
    (this->*kind).calls -= (other.*kind).calls;
    (this->*kind).bytes -= (other.*kind).bytes;
  }
  return *this;
}

int64_t CommunicationVolume::bytes() const {
  return all_reduce.bytes + reduce_scatter.bytes + all_gather.bytes + broadcast.bytes +
         all_to_all.bytes + send.bytes + plain_data.bytes;
}

CollectiveHandle::CollectiveHandle(CollectiveHandle&& other) noexcept
    : wait_(std::exchange(other.wait_, nullptr)) {}

CollectiveHandle& CollectiveHandle::operator=(CollectiveHandle&& other) noexcept {
  CollectiveHandle previous(std::exchange(wait_, std::exchange(other.wait_, nullptr)));
  return *this;
}

CollectiveHandle::~CollectiveHandle() {
  try {
    Wait();
  } catch (...) {  // a caller that needs the error calls Wait
  }
}

void CollectiveHandle::Wait() {
  const std::function<void()> wait = std::exchange(wait_, nullptr);
  if (wait) wait();
}

Communicator::Communicator(std::string name, std::vector<int> ranks, int rank, at::Device device)
    : name_(std::move(name)), ranks_(std::move(ranks)), rank_(rank), device_(device) {}

Communicator::~Communicator() = default;

absl::StatusOr<std::shared_ptr<Communicator>> Communicator::Connect(
    const RankEnvironment& environment, const CommunicatorOptions& options) {
  const SteadyTime deadline = SteadyTime::Now() + options.timeout;
  std::vector<int> ranks(environment.world_size);
  for (int rank = 0; rank < environment.world_size; ++rank) ranks[rank] = rank;
  std::shared_ptr<Communicator> world(
      new Communicator("world", std::move(ranks), environment.rank, options.device));
  if (environment.world_size == 1) return world;
  TANDEM_ASSIGN_OR_RETURN(world->store_,
                          RankStore::Connect(environment, "communicator", options.timeout));
  // Every step has a time limit but for the answer of a rank that is stopped, or that is none.
  const SteadyTime give_up = deadline + kC10dGrace;
  const absl::Status status = RunUntil(give_up, "process group", [=]() -> absl::Status {
    const c10::OptionalDeviceGuard guard(
        options.device.has_index() ? std::optional<c10::Device>(options.device) : std::nullopt);
    TANDEM_RETURN_IF_ERROR(AwaitAll(*world->store_, environment, deadline));
    world->group_ = ProcessGroup::Create(*world->store_, "world", environment.rank,
                                         environment.world_size, options.device, options.timeout);
    // When this returns on rank 0, no rank needs its store any more.
    world->group_->Barrier()();
    return absl::OkStatus();
  });
  if (!status.ok()) {
    return absl::UnavailableError(absl::StrCat(
        "rank ", environment.rank, " of ", environment.world_size, " cannot join the others at ",
        environment.master_addr, ":", environment.master_port, ": ", status.message()));
  }
  return world;
}

std::shared_ptr<Communicator> Communicator::Alone() {
  // There is no rank to wait for.
  return Connect({}, {.timeout = absl::ZeroDuration()}).value();
}

std::shared_ptr<Communicator> Communicator::Split(const std::string& name,
                                                  const std::vector<std::vector<int>>& groups,
                                                  const SplitOptions& options) {
  const std::string what = absl::StrCat("split '", name, "'");
  std::shared_ptr<Communicator> mine;
  std::vector<bool> seen(size(), false);
  int index = 0;
  std::string key;
  for (const std::vector<int>& group : groups) {
    std::vector<int> ranks;
    int rank = -1;
    for (const int member : group) {
      CheckPeer(what, member);
      TORCH_CHECK(!seen[member], what, ": rank ", member, " is in it twice");
      seen[member] = true;
      if (member == rank_) rank = static_cast<int>(ranks.size());
      ranks.push_back(ranks_[member]);
    }
    if (rank >= 0) {
      mine.reset(new Communicator(name, std::move(ranks), rank, options.device.value_or(device_)));
      mine->store_ = store_;
      mine->total_ = total_;
      mine->on_failure_ = on_failure_;
      key = absl::StrCat(name_, "/", splits_, "/", index);
    }
    ++index;
  }
  ++splits_;
  if (group_ == nullptr) return mine;
  Run(what, -1, [&] {
    if (mine != nullptr && mine->size() > 1) {
      mine->group_ =
          group_->CreateSubgroup(key, mine->rank(), mine->size(), mine->device_, options.timeout);
    }
    // Rank 0 hosts the store: it must not leave while another rank still joins.
    group_->Barrier()();
  });
  return mine;
}

void Communicator::Run(absl::string_view what, int peer, absl::FunctionRef<void()> body) const {
  std::string message;
  try {
    body();
    return;
  } catch (const c10::Error& error) {
    message = error.what_without_backtrace();
  } catch (const std::exception& error) {
    message = error.what();
  }
  const std::string failure = absl::StrCat(
      what, " in '", name_, "' on rank ", ranks_[rank_], " of ranks ", absl::StrJoin(ranks_, ", "),
      peer < 0 ? "" : absl::StrCat(", with rank ", ranks_[peer]), ": ", message);
  if (on_failure_ != nullptr) on_failure_(failure);
  TORCH_CHECK(false, failure);
}

void Communicator::CheckTensor(absl::string_view what, const at::Tensor& tensor) const {
  TORCH_CHECK(tensor.defined() && tensor.is_contiguous() && tensor.device() == device_, what,
              " takes contiguous tensors on ", device_);
}

void Communicator::CheckPeer(absl::string_view what, int peer) const {
  TORCH_CHECK(peer >= 0 && peer < size(), what, ": there is no rank ", peer, " among ", size());
}

void Communicator::CheckShards(absl::string_view what, const at::Tensor& whole,
                               const at::Tensor& shard) const {
  CheckTensor(what, whole);
  CheckTensor(what, shard);
  TORCH_CHECK(whole.numel() == size() * shard.numel() && whole.dtype() == shard.dtype(), what,
              ": the whole, ", whole.sizes(), " of ", whole.dtype(), ", is not ", size(),
              " times the shard, ", shard.sizes(), " of ", shard.dtype());
}

at::Tensor Communicator::ShardOf(const at::Tensor& whole, int rank) const {
  const int64_t length = whole.numel() / size();
  return whole.view(-1).narrow(0, rank * length, length);
}

void Communicator::Count(CollectiveVolume CommunicationVolume::*kind, int64_t bytes) {
  CommunicationVolume one;
  one.*kind = {.calls = 1, .bytes = size() == 1 ? 0 : bytes};
  volume_ += one;
  if (size() == 1) return;
  const std::lock_guard lock(total_->mutex);
  total_->volume += one;
}

CommunicationVolume Communicator::total_volume() const {
  const std::lock_guard lock(total_->mutex);
  return total_->volume;
}

const std::shared_ptr<Communicator>& Communicator::patient() {
  if (patient_ == nullptr) {
    std::vector<int> all(static_cast<size_t>(size()));
    std::iota(all.begin(), all.end(), 0);
    patient_ = Split("patient", {all}, {.device = device_, .timeout = kNoTimeLimit});
  }
  return patient_;
}

void Communicator::AllReduce(at::Tensor& tensor, Reduction reduction) {
  CheckTensor("all-reduce", tensor);
  const at::Tensor wide = tensor.to(SumType("all-reduce", tensor.scalar_type()));
  Count(&CommunicationVolume::all_reduce,
        2 * (size() - 1) * static_cast<int64_t>(wide.nbytes()) / size());
  if (group_ == nullptr || tensor.numel() == 0) return;
  Run("all-reduce", -1, [&] {
    (reduction == Reduction::kSum ? group_->AllReduceSum(wide) : group_->AllReduceMax(wide))();
  });
  if (!wide.is_same(tensor)) tensor.copy_(wide);
}

void Communicator::ReduceScatter(const at::Tensor& output, const at::Tensor& input) {
  ReduceScatterAsync(output, input).Wait();
}

CollectiveHandle Communicator::ReduceScatterAsync(const at::Tensor& output,
                                                  const at::Tensor& input) {
  CheckShards("reduce-scatter", input, output);
  SumType("reduce-scatter", input.scalar_type());
  Count(&CommunicationVolume::reduce_scatter, (size() - 1) * static_cast<int64_t>(output.nbytes()));
  if (input.numel() == 0) return {};
  if (group_ == nullptr) {
    if (output.const_data_ptr() != input.const_data_ptr()) output.view(-1).copy_(input.view(-1));
    return {};
  }
  return CollectiveHandle(DoReduceScatter(output.view(-1), input.view(-1)));
}

std::function<void()> Communicator::DoReduceScatter(const at::Tensor& output,
                                                    const at::Tensor& input) {
  if (device_.is_cpu()) return AddInRankOrder(output, input);
  const at::ScalarType type = SumType("reduce-scatter", input.scalar_type());
  const at::Tensor whole = input.to(type);
  const at::Tensor shard = type == output.scalar_type() ? output : at::empty_like(output, type);
  Wait wait;
  Run("reduce-scatter", -1, [&] { wait = group_->ReduceScatter(shard, whole); });
  return [this, output, shard, whole, wait] {
    Run("reduce-scatter", -1, wait);
    if (!shard.is_same(output)) output.copy_(shard);
  };
}

std::function<void()> Communicator::AddInRankOrder(const at::Tensor& output,
                                                   const at::Tensor& input) {
  std::vector<at::Tensor> shards(size());
  std::vector<Wait> received(size()), sent(size());
  // Each rank starts with its neighbour, so that not all of them send to the same rank at once.
  for (int step = 1; step < size(); ++step) {
    const int from = (rank_ + size() - step) % size();
    shards[from] = at::empty_like(output);
    Run("reduce-scatter", from,
        [&] { received[from] = group_->Recv(shards[from], from, kReduceScatterTag); });
  }
  for (int step = 1; step < size(); ++step) {
    const int to = (rank_ + step) % size();
    Run("reduce-scatter", to,
        [&] { sent[to] = group_->Send(ShardOf(input, to), to, kReduceScatterTag); });
  }
  shards[rank_] = ShardOf(input, rank_);
  return [this, output, shards, received, sent] {
    const auto shard = [&](int from) -> const at::Tensor& {
      if (from != rank_) Run("reduce-scatter", from, received[from]);
      return shards[from];
    };
    // The sum accumulates in the first shard; in the second if the first is the caller's. The order
    // of the first two does not change a sum.
    std::vector<int> order(size());
    for (int from = 0; from < size(); ++from) order[from] = from;
    if (rank_ == 0) std::swap(order[0], order[1]);
    const at::Tensor sum = shard(order[0]).to(SumType("reduce-scatter", output.scalar_type()));
    for (int i = 1; i < size() - 1; ++i) sum.add_(shard(order[i]));
    at::Tensor result = output;
    at::add_out(result, sum, shard(order.back()));
    for (int to = 0; to < size(); ++to) {
      if (to != rank_) Run("reduce-scatter", to, sent[to]);
    }
  };
}

void Communicator::AllGather(const at::Tensor& output, const at::Tensor& input) {
  AllGatherAsync(output, input).Wait();
}

CollectiveHandle Communicator::AllGatherAsync(const at::Tensor& output, const at::Tensor& input) {
  CheckShards("all-gather", output, input);
  Count(&CommunicationVolume::all_gather, (size() - 1) * static_cast<int64_t>(input.nbytes()));
  if (output.numel() == 0) return {};
  return CollectiveHandle(DoAllGather(output.view(-1), input.view(-1)));
}

std::function<void()> Communicator::DoAllGather(const at::Tensor& output, const at::Tensor& input) {
  if (group_ != nullptr && !device_.is_cpu()) {
    Wait wait;
    Run("all-gather", -1, [&] { wait = group_->AllGather(output, input); });
    return [this, wait, output, input] { Run("all-gather", -1, wait); };
  }
  const at::Tensor own = ShardOf(output, rank_);
  if (own.const_data_ptr() != input.const_data_ptr()) own.copy_(input);
  if (group_ == nullptr) return nullptr;
  std::vector<std::pair<int, Wait>> waits;
  for (int step = 1; step < size(); ++step) {
    const int from = (rank_ + size() - step) % size();
    Run("all-gather", from, [&] {
      waits.emplace_back(from, group_->Recv(ShardOf(output, from), from, kAllGatherTag));
    });
  }
  for (int step = 1; step < size(); ++step) {
    const int to = (rank_ + step) % size();
    Run("all-gather", to, [&] { waits.emplace_back(to, group_->Send(own, to, kAllGatherTag)); });
  }
  return [this, waits] {
    for (const auto& [peer, wait] : waits) Run("all-gather", peer, wait);
  };
}

void Communicator::AllToAll(const at::Tensor& output, const at::Tensor& input,
                            const std::vector<int64_t>& sent,
                            const std::vector<int64_t>& received) {
  constexpr char kWhat[] = "all-to-all";
  CheckTensor(kWhat, output);
  CheckTensor(kWhat, input);
  const auto ranks = static_cast<size_t>(size()), own = static_cast<size_t>(rank_);
  TORCH_CHECK(sent.size() == ranks && received.size() == ranks && sent[own] == received[own], kWhat,
              ": a number of rows for each of ", ranks, " ranks, the same from this rank as to it");
  const std::vector<at::Tensor> to_ranks = RowRanges(kWhat, input, sent);
  const std::vector<at::Tensor> from_ranks = RowRanges(kWhat, output, received);
  Count(&CommunicationVolume::all_to_all,
        static_cast<int64_t>(input.nbytes() - to_ranks[own].nbytes()));
  if (group_ != nullptr && !device_.is_cpu()) {
    return Run(kWhat, -1, [&] { group_->AllToAll(output, input, received, sent)(); });
  }
  from_ranks[own].copy_(to_ranks[own]);
  if (group_ == nullptr) return;
  std::vector<std::pair<int, Wait>> waits;
  for (int step = 1; step < size(); ++step) {
    const int from = (rank_ + size() - step) % size();
    const at::Tensor& rows = from_ranks[static_cast<size_t>(from)];
    if (rows.numel() == 0) continue;
    Run(kWhat, from, [&] { waits.emplace_back(from, group_->Recv(rows, from, kAllToAllTag)); });
  }
  for (int step = 1; step < size(); ++step) {
    const int to = (rank_ + step) % size();
    const at::Tensor& rows = to_ranks[static_cast<size_t>(to)];
    if (rows.numel() == 0) continue;
    Run(kWhat, to, [&] { waits.emplace_back(to, group_->Send(rows, to, kAllToAllTag)); });
  }
  for (const auto& [peer, wait] : waits) Run(kWhat, peer, wait);
}

void Communicator::Broadcast(at::Tensor& tensor, int root) {
  CheckTensor("broadcast", tensor);
  CheckPeer("broadcast", root);
  Count(&CommunicationVolume::broadcast, root == rank_ ? static_cast<int64_t>(tensor.nbytes()) : 0);
  DoBroadcast(tensor, root);
}

void Communicator::DoBroadcast(const at::Tensor& tensor, int root) {
  if (group_ == nullptr || tensor.numel() == 0) return;
  Run(absl::StrCat("broadcast from rank ", ranks_[root]), -1,
      [&] { group_->Broadcast(tensor, root)(); });
}

void Communicator::Send(const at::Tensor& tensor, int to) { SendAsync(tensor, to).Wait(); }

void Communicator::Recv(at::Tensor& tensor, int from) { RecvAsync(tensor, from).Wait(); }

CollectiveHandle Communicator::SendAsync(const at::Tensor& tensor, int to) {
  CheckTensor("send", tensor);
  CheckPeer("send", to);
  TORCH_CHECK(to != rank_, "send: rank ", to, " sends to itself");
  Count(&CommunicationVolume::send, static_cast<int64_t>(tensor.nbytes()));
  if (tensor.numel() == 0) return {};
  Wait wait;
  Run("send", to, [&] { wait = group_->Send(tensor, to, kSendTag); });
  return CollectiveHandle([this, to, wait] { Run("send", to, wait); });
}

CollectiveHandle Communicator::RecvAsync(at::Tensor& tensor, int from) {
  CheckTensor("receive", tensor);
  CheckPeer("receive", from);
  TORCH_CHECK(from != rank_, "receive: rank ", from, " receives from itself");
  Count(&CommunicationVolume::receive, static_cast<int64_t>(tensor.nbytes()));
  if (tensor.numel() == 0) return {};
  Wait wait;
  Run("receive", from, [&] { wait = group_->Recv(tensor, from, kSendTag); });
  return CollectiveHandle([this, from, wait] { Run("receive", from, wait); });
}

void Communicator::Barrier() {
  if (group_ != nullptr) Run("barrier", -1, [&] { group_->Barrier()(); });
}

std::string Communicator::BroadcastBytes(std::string bytes, int root) {
  CheckPeer("broadcast of bytes", root);
  Count(&CommunicationVolume::plain_data, root == rank_ ? static_cast<int64_t>(bytes.size()) : 0);
  if (group_ == nullptr) return bytes;
  // Short data travels in one exchange with its length.
  auto size = static_cast<int64_t>(bytes.size());
  std::string head(kHeadBytes, '\0');
  std::memcpy(head.data(), &size, sizeof(size));
  const size_t room = kHeadBytes - sizeof(size);
  std::memcpy(head.data() + sizeof(size), bytes.data(), std::min(room, bytes.size()));
  const at::Tensor sent_head = ToTensor(head).to(device_);
  DoBroadcast(sent_head, root);
  if (root != rank_) {
    head = ToBytes(sent_head, kHeadBytes);
    std::memcpy(&size, head.data(), sizeof(size));
  }
  if (size <= static_cast<int64_t>(room)) {
    return head.substr(sizeof(size), static_cast<size_t>(size));
  }
  const at::Tensor data =
      (root == rank_ ? ToTensor(bytes) : at::empty({size}, at::kByte)).to(device_);
  DoBroadcast(data, root);
  return ToBytes(data, size);
}

std::vector<std::string> Communicator::AllGatherBytes(const std::string& bytes) {
  if (group_ == nullptr) {
    Count(&CommunicationVolume::plain_data, 0);
    return {bytes};
  }
  const auto gather = [this](const at::Tensor& own) {
    at::Tensor all = at::empty({size() * own.numel()}, own.options());
    DoAllGather(all, own)();
    return all;
  };
  const at::Tensor lengths =
      gather(at::full({1}, static_cast<int64_t>(bytes.size()), at::kLong).to(device_)).cpu();
  // The shards of a gather have one size: the longest.
  const auto longest = lengths.max().item<int64_t>();
  Count(&CommunicationVolume::plain_data, (size() - 1) * longest);
  std::string padded = bytes;
  padded.resize(longest);
  const at::Tensor all =
      longest == 0 ? at::empty({0}, at::kByte) : gather(ToTensor(padded).to(device_)).cpu();
  std::vector<std::string> gathered;
  for (int rank = 0; rank < size(); ++rank) {
    gathered.push_back(ToBytes(ShardOf(all, rank), lengths[rank].item<int64_t>()));
  }
  return gathered;
}

}  // namespace tandem::ranks
