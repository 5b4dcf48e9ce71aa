// The side socket: each packet has one SideRequest, and perhaps descriptors (docs/protocol.md, section 4).
#pragma once

#include <chrono>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

#include "kvtier/v1/side.pb.h"
#include "shared.hpp"

namespace kvtier_example {

// The daemon has refused a request, which has changed nothing.
class Refused : public std::runtime_error {
   public:
    explicit Refused(kvtier::v1::Error error) : std::runtime_error(text_of(error)), error_(std::move(error)) {}
    kvtier::v1::Reason reason() const { return error_.reason(); }
    const kvtier::v1::Error& error() const { return error_; }
    // "BLOCK_ID_RANGE [block_ids[0]=99]: every rank has ..."
    static std::string text_of(const kvtier::v1::Error& error);

   private:
    kvtier::v1::Error error_;
};

// The daemon is gone, or does not answer, so the session is over.
class Lost : public std::runtime_error {
   public:
    using std::runtime_error::runtime_error;
};

class SideSocket {
   public:
    // `grpc_path` is the gRPC socket, beside which the side socket lies. Throws Lost.
    explicit SideSocket(const std::string& grpc_path);

    int fd() const { return socket_.get(); }

    // Makes one exchange. `meanwhile` is called at least every 50 ms, because heartbeats have to go on; it may throw to end
    // the wait. Throws Refused for what the daemon refuses, and Lost for everything else. The descriptor that is sent stays
    // the caller's; those that come back are put into `received`, and must be `receive_fds`.
    kvtier::v1::SideResponse call(kvtier::v1::SideRequest request, int send_fd, std::size_t receive_fds,
                                  std::vector<Fd>& received, std::chrono::milliseconds timeout,
                                  const std::function<void()>& meanwhile);

   private:
    void send(const std::string& packet, int send_fd);
    kvtier::v1::SideResponse receive(std::vector<Fd>& received);

    Fd socket_;
    std::uint64_t next_id_ = 1;
};

}  // namespace kvtier_example
