#include "collective/network_links.h"

#include <errno.h>
#include <poll.h>
#include <string.h>
#include <sys/socket.h>
#include <torch/headeronly/util/Exception.h>

#include "runtime/pause_cpu.h"
#include "runtime/task_times.h"

namespace armllm {
namespace {

constexpr Nanoseconds kSpin = 50000;  // an exchange within a machine or a rack takes less

// The bytes that are left to send to a rank, and to receive from it.
struct Link {
  int socket;
  int64_t rank;
  char* own;
  char* theirs;
  int64_t to_send, to_receive;

  bool done() const { return to_send == 0 && to_receive == 0; }
  bool advance();
};

// Returns the bytes that moved; 0 if the socket has no room, or no data, right now.
int64_t moved(ssize_t result, int64_t rank) {
  if (result > 0) return result;
  STD_TORCH_CHECK(result < 0, "tensor parallel: rank ", rank, " has closed its connection");
  STD_TORCH_CHECK(errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR,
                  "tensor parallel: the connection to rank ", rank, " failed: ", strerror(errno));
  return 0;
}

bool Link::advance() {
  const int64_t before = to_send + to_receive;
  if (to_send > 0) {
    const int64_t sent = moved(send(socket, own, size_t(to_send), MSG_DONTWAIT | MSG_NOSIGNAL), rank);
    own += sent;
    to_send -= sent;
  }
  if (to_receive > 0) {
    const int64_t received = moved(recv(socket, theirs, size_t(to_receive), MSG_DONTWAIT), rank);
    theirs += received;
    to_receive -= received;
  }
  return to_send + to_receive < before;
}

void wait_for_any(const std::vector<Link>& links) {
  std::vector<pollfd> waits;
  for (const Link& link : links) {
    const int events = (link.to_send > 0 ? POLLOUT : 0) | (link.to_receive > 0 ? POLLIN : 0);
    if (events != 0) waits.push_back({link.socket, short(events), 0});
  }
  poll(waits.data(), waits.size(), 100);
}

}  // namespace

void NetworkLinks::exchange(const std::function<char*(int64_t)>& buffer_of, int64_t bytes) const {
  std::vector<Link> links;
  for (int64_t other = 0; other < int64_t(sockets_.size()); ++other)
    if (other != rank_)
      links.push_back({int(sockets_[other]), other, buffer_of(rank_), buffer_of(other), bytes, bytes});
  Nanoseconds moved_at = monotonic_time();
  for (;;) {
    bool advanced = false;
    const Link* waiting = nullptr;
    for (Link& link : links) {
      if (!link.done()) advanced |= link.advance();
      if (!link.done()) waiting = &link;
    }
    if (waiting == nullptr) return;
    const Nanoseconds now = monotonic_time();
    if (advanced) {
      moved_at = now;
    } else if (now - moved_at < kSpin) {
      pause_cpu();
    } else {
      STD_TORCH_CHECK(now - moved_at < timeout_ns_, "tensor parallel: rank ", waiting->rank,
                      " has not answered for ", timeout_ns_ / 1000000000, " s");
      wait_for_any(links);
    }
  }
}

}  // namespace armllm
