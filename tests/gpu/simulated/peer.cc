// Memory of a simulated GPU that another process reads, as with CUDA IPC: the reader opens the file
// in which the other process has the bytes of its devices.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <torch/library.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>
#include <sstream>
#include <string>
#include <utility>

#include "tests/gpu/simulated/counts.h"
#include "tests/gpu/simulated/graph.h"
#include "tests/gpu/simulated/memory.h"
#include "tests/gpu/simulated/stream.h"

namespace tandem::simulated_gpu {
namespace {

// The bytes of an allocation of another process.
struct Peer {
  const char* mapped;
  int64_t bytes;
};

struct Peers {
  std::mutex mutex;
  std::map<int64_t, Peer> opened;
  int64_t last = 0;
};

// Leaked, as all that libtorch may call while the process ends.
Peers& ThePeers() {
  static Peers& peers = *new Peers;
  return peers;
}

struct stat InfoOf(int file) {
  struct stat info = {};
  TORCH_CHECK(fstat(file, &info) == 0, "the simulated GPU cannot read its file");
  return info;
}

// Describes the allocation that begins at an address: process, file, device and inode of the file,
// by which a reader knows that it found it, and the place of the bytes.
std::string Share(int64_t address) {
  const auto* const memory = reinterpret_cast<const void*>(address);
  OnShared(memory);
  const auto [begin, bytes] = AllocationOf(memory);
  TORCH_CHECK(begin == memory, "memory is shared from the begin of its allocation");
  const struct stat info = InfoOf(FileOfMemory());
  std::ostringstream handle;
  handle << getpid() << ' ' << FileOfMemory() << ' ' << info.st_dev << ' ' << info.st_ino << ' '
         << PlaceInFile(memory) << ' ' << bytes;
  return handle.str();
}

int64_t Open(std::string handle) {
  std::istringstream in(std::move(handle));
  int64_t process = 0, number = 0, place = 0;
  uint64_t device = 0, inode = 0;
  Peer peer = {};
  in >> process >> number >> device >> inode >> place >> peer.bytes;
  TORCH_CHECK(!in.fail(), "the simulated GPU cannot read a handle");
  // As CUDA refuses it.
  TORCH_CHECK(process != getpid(), "memory is opened in the process that shares it");
  std::ostringstream path;
  path << "/proc/" << process << "/fd/" << number;
  const int file = open(path.str().c_str(), O_RDONLY | O_CLOEXEC);
  TORCH_CHECK(file >= 0, "the simulated GPU cannot open ", path.str());
  const struct stat info = InfoOf(file);
  void* mapped = MAP_FAILED;
  constexpr int64_t kPage = 4096;
  const int64_t first = place / kPage * kPage;
  if (info.st_dev == device && info.st_ino == inode && place + peer.bytes <= info.st_size) {
    mapped = mmap(nullptr, static_cast<size_t>(place - first + peer.bytes), PROT_READ, MAP_SHARED,
                  file, first);
  }
  close(file);
  TORCH_CHECK(mapped != MAP_FAILED, path.str(), " is not the memory that was shared");
  peer.mapped = static_cast<const char*>(mapped) + (place - first);
  Peers& peers = ThePeers();
  const std::lock_guard lock(peers.mutex);
  peers.opened[++peers.last] = peer;
  return peers.last;
}

Peer Find(int64_t id) {
  Peers& peers = ThePeers();
  const std::lock_guard lock(peers.mutex);
  const auto found = peers.opened.find(id);
  TORCH_CHECK(found != peers.opened.end(), "memory of another process is used after its end");
  return found->second;
}

// Copies bytes to an address of a device, on its current stream.
void Copy(int64_t id, int64_t offset, int64_t to, int64_t bytes) {
  RefuseInCapture("a copy from another process");
  const Peer peer = Find(id);
  TORCH_CHECK(offset >= 0 && offset + bytes <= peer.bytes, "bytes beyond what is shared");
  auto* const memory = reinterpret_cast<void*>(to);
  ++TheCounts().launches;
  Enqueue(CurrentStream(DeviceOf(memory)), {{memory, /*writes=*/true}});
  std::memcpy(OnHost(memory), peer.mapped + offset, static_cast<size_t>(bytes));
}

void Close(int64_t id) {
  const Peer peer = Find(id);
  const auto first = reinterpret_cast<uintptr_t>(peer.mapped) & ~uintptr_t{4095};
  munmap(reinterpret_cast<void*>(first),
         reinterpret_cast<uintptr_t>(peer.mapped) - first + static_cast<size_t>(peer.bytes));
  Peers& peers = ThePeers();
  const std::lock_guard lock(peers.mutex);
  peers.opened.erase(id);
}

TORCH_LIBRARY(tandem_peer, library) {
  library.def("share(int address) -> str", &Share);
  library.def("open(str handle) -> int", &Open);
  library.def("copy(int memory, int offset, int to, int bytes) -> ()", &Copy);
  library.def("close(int memory) -> ()", &Close);
}

}  // namespace
}  // namespace tandem::simulated_gpu
