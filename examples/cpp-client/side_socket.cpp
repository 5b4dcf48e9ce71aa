#include "side_socket.hpp"

#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <array>
#include <cerrno>
#include <cstring>

namespace kvtier_example {

namespace {

constexpr std::size_t kPacketBytes = 65'536;
constexpr std::size_t kFdsMax = 4;
constexpr std::string_view kSuffix = ".sock";

std::string side_path(std::string path) {
    if (path.ends_with(kSuffix)) path.resize(path.size() - kSuffix.size());
    return path + ".side.sock";
}

}  // namespace

std::string Refused::text_of(const kvtier::v1::Error& error) {
    std::string name = kvtier::v1::Reason_Name(error.reason());
    if (name.starts_with("REASON_")) name.erase(0, 7);
    if (name.empty()) name = std::to_string(error.reason());  // the daemon is newer than we are
    if (!error.field().empty()) name += " [" + error.field() + "=" + error.value() + "]";
    return name + ": " + error.message();
}

SideSocket::SideSocket(const std::string& grpc_path) : socket_(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0)) {
    const std::string path = side_path(grpc_path);
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    if (path.size() >= sizeof address.sun_path) throw Lost(path + ": the path of a Unix socket has at most 107 bytes");
    std::memcpy(address.sun_path, path.c_str(), path.size() + 1);
    if (connect(socket_.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0)
        throw Lost("no daemon listens at " + path + ": " + std::strerror(errno));
}

kvtier::v1::SideResponse SideSocket::call(kvtier::v1::SideRequest request, int send_fd, std::size_t receive_fds,
                                          std::vector<Fd>& received, std::chrono::milliseconds timeout,
                                          const std::function<void()>& meanwhile) {
    const auto deadline = std::chrono::steady_clock::now() + timeout;
    request.set_id(next_id_++);
    send(request.SerializeAsString(), send_fd);
    for (pollfd waiting{fd(), POLLIN, 0}; poll(&waiting, 1, 50) == 0;) {
        meanwhile();
        if (std::chrono::steady_clock::now() > deadline) throw Lost("the daemon does not answer on the side socket");
    }
    auto response = receive(received);
    if (response.has_error()) throw Refused(response.error());  // also with id 0, if the daemon takes no more sessions
    if (response.id() != request.id()) throw Lost("a reply with another id on the side socket");
    if (received.size() != receive_fds) throw Lost("a reply with other descriptors on the side socket");
    return response;
}

void SideSocket::send(const std::string& packet, int send_fd) {
    iovec data{const_cast<char*>(packet.data()), packet.size()};
    alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int))> room{};
    msghdr message{};
    message.msg_iov = &data;
    message.msg_iovlen = 1;
    if (send_fd >= 0) {
        message.msg_control = room.data();
        message.msg_controllen = room.size();
        cmsghdr* header = CMSG_FIRSTHDR(&message);
        header->cmsg_level = SOL_SOCKET;
        header->cmsg_type = SCM_RIGHTS;
        header->cmsg_len = CMSG_LEN(sizeof(int));
        std::memcpy(CMSG_DATA(header), &send_fd, sizeof(int));
    }
    if (sendmsg(fd(), &message, MSG_NOSIGNAL) < 0)
        throw Lost(std::string("the daemon closed the side socket: ") + std::strerror(errno));
}

kvtier::v1::SideResponse SideSocket::receive(std::vector<Fd>& received) {
    std::string packet(kPacketBytes, '\0');
    iovec data{packet.data(), packet.size()};
    alignas(cmsghdr) std::array<char, CMSG_SPACE(kFdsMax * sizeof(int))> room{};
    msghdr message{};
    message.msg_iov = &data;
    message.msg_iovlen = 1;
    message.msg_control = room.data();
    message.msg_controllen = room.size();
    const ssize_t bytes = recvmsg(fd(), &message, MSG_CMSG_CLOEXEC);
    if (bytes <= 0) throw Lost("the daemon closed the side socket");
    for (cmsghdr* header = CMSG_FIRSTHDR(&message); header != nullptr; header = CMSG_NXTHDR(&message, header)) {
        if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS) continue;
        for (std::size_t at = 0; at + sizeof(int) <= header->cmsg_len - CMSG_LEN(0); at += sizeof(int)) {
            int fd = -1;
            std::memcpy(&fd, CMSG_DATA(header) + at, sizeof(int));
            received.emplace_back(fd);
        }
    }
    if (message.msg_flags & (MSG_TRUNC | MSG_CTRUNC)) throw Lost("a reply on the side socket was cut short");
    kvtier::v1::SideResponse response;
    if (!response.ParseFromArray(packet.data(), static_cast<int>(bytes)))
        throw Lost("the daemon sent something else than a SideResponse");
    return response;
}

}  // namespace kvtier_example
