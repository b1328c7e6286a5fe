// Page sharing for C++17: exports pages of an arena and maps pages of another process. Header-only
// over vmmgraph.h. Conventions: vmmgraph.hpp.
//
//   options.sharing = vmmgraph::Sharing::fd;                       // when the device is opened
//   for (const vmmgraph::PageExtent& part : vmmgraph::export_range(space, block, bytes))
//       exported.try_emplace(part.page, device, part.page);        // once per page
//   const auto& one = exported.at(page);
//   vmmgraph::send_descriptors(socket, {one.descriptor()}, &page_bytes, sizeof page_bytes);
//
//   vmmgraph::PeerPage page(device, descriptor, page_bytes);       // in the other process
//   vmmgraph::PeerMap range(device, {{&page, offset, bytes}});     // range.address(): shared

#ifndef VMMGRAPH_SHARE_HPP
#define VMMGRAPH_SHARE_HPP

#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "arena.hpp"

namespace vmmgraph {

// A part of a page and its address: page, offset, bytes, address, page_bytes. Page numbers are
// never reused on a device.
using PageExtent = vmmgraph_page_extent_t;

namespace detail {

template <class Handle, class Export>
[[nodiscard]] std::vector<PageExtent> extents_of(Export export_range, Handle handle, void* base,
                                                 std::size_t bytes) {
    std::vector<PageExtent> extents;
    std::size_t count = 0;
    do {
        extents.resize(count);
        check(export_range(handle, base, bytes, extents.data(), extents.size(), &count));
    } while (count > extents.size());
    extents.resize(count);
    return extents;
}

}  // namespace detail

// Returns the pages under a range of the space's addresses, in order. See vmmgraph_space_export().
[[nodiscard]] inline std::vector<PageExtent> export_range(const Space& space, void* base,
                                                          std::size_t bytes) {
    return detail::extents_of(vmmgraph_space_export, space.handle(), base, bytes);
}

// Returns the page under (a part of) a private (exclusive) block: one extent, constant for its
// life.
[[nodiscard]] inline std::vector<PageExtent> export_range(const SharedVmmAllocator& arena,
                                                          void* base, std::size_t bytes) {
    return detail::extents_of(vmmgraph_arena_export, arena.handle(), base, bytes);
}

// A file descriptor with one owner.
class Descriptor {
public:
    Descriptor() noexcept = default;
    explicit Descriptor(int descriptor) noexcept : descriptor_(descriptor) {}
    Descriptor(Descriptor&& other) noexcept : descriptor_(other.release()) {}
    Descriptor& operator=(Descriptor&& other) noexcept {
        // This order makes self-move a no-op.
        const int taken = other.release();
        const Descriptor old(std::exchange(descriptor_, taken));
        return *this;
    }
    Descriptor(const Descriptor&) = delete;
    Descriptor& operator=(const Descriptor&) = delete;
    ~Descriptor() {
        if (descriptor_ >= 0) {
            static_cast<void>(::close(descriptor_));
        }
    }

    // Still owned by this object; -1 if none.
    [[nodiscard]] int get() const noexcept { return descriptor_; }
    // Releases ownership to the caller.
    [[nodiscard]] int release() noexcept { return std::exchange(descriptor_, -1); }

private:
    int descriptor_ = -1;
};

// An exported page of an arena, pinned while alive: not freed, lent, paused or replaced. Destroy
// after all importing processes have closed the page. The device must outlive the object.
class ExportedPage {
public:
    // Throws if the device was opened without sharing, and for pages not named by export_range.
    ExportedPage(const Device& device, std::uint64_t page) : device_(device.handle()), page_(page) {
        int descriptor = -1;
        detail::check(vmmgraph_device_export_page(device_, page_, &descriptor));
        descriptor_ = Descriptor(descriptor);
    }
    ExportedPage(const ExportedPage&) = delete;
    ExportedPage& operator=(const ExportedPage&) = delete;
    // Errors are ignored: only a device closed before refuses.
    ~ExportedPage() { static_cast<void>(vmmgraph_device_page_exported(device_, page_, -1)); }

    [[nodiscard]] std::uint64_t page() const noexcept { return page_; }
    // Descriptor for importing processes, still owned by this object; -1 once closed.
    [[nodiscard]] int descriptor() const noexcept { return descriptor_.get(); }
    // Closes the descriptor, for use after sending. The page stays pinned.
    void close_descriptor() noexcept { descriptor_ = Descriptor(); }

private:
    vmmgraph_device_t device_;
    std::uint64_t page_;
    Descriptor descriptor_;
};

// Fabric handle of a page: plain bytes to send.
using FabricHandle = vmmgraph_fabric_handle_t;

// Exports a page to processes of other hosts. Each call pins the page once more;
// vmmgraph_device_page_exported(device.handle(), page, -1) removes a pin.
[[nodiscard]] inline FabricHandle export_fabric(const Device& device, std::uint64_t page) {
    FabricHandle handle{};
    detail::check(vmmgraph_device_export_fabric(device.handle(), page, &handle));
    return handle;
}

// A page of another process. The memory lives as long as this object or a range, whatever its owner
// does.
class PeerPage {
public:
    // `bytes` is the owner's PageExtent::page_bytes. The descriptor is not needed afterwards.
    // Throws for any other descriptor.
    PeerPage(const Device& device, int descriptor, std::uint64_t bytes) {
        vmmgraph_peer_page_t handle = nullptr;
        detail::check(vmmgraph_device_import(device.handle(), descriptor, bytes, &handle));
        handle_ = detail::Owned<vmmgraph_peer_page_t, vmmgraph_peer_page_close>(handle);
    }

    // As above, from a fabric handle, on a device with Sharing::fabric.
    PeerPage(const Device& device, const FabricHandle& fabric, std::uint64_t bytes) {
        vmmgraph_peer_page_t handle = nullptr;
        detail::check(vmmgraph_device_import_fabric(device.handle(), &fabric, bytes, &handle));
        handle_ = detail::Owned<vmmgraph_peer_page_t, vmmgraph_peer_page_close>(handle);
    }

    [[nodiscard]] vmmgraph_peer_page_t handle() const noexcept { return handle_.get(); }

private:
    detail::Owned<vmmgraph_peer_page_t, vmmgraph_peer_page_close> handle_;
};

// A part of another process's page, as in its owner's PageExtent.
struct PeerExtent {
    const PeerPage* page = nullptr;
    std::uint64_t offset = 0;
    std::uint64_t bytes = 0;
};

// Contiguous local addresses for a range of another process. The pages are unmapped at destruction,
// after the recorded streams' work.
class PeerMap {
public:
    // Throws unless the parts make one range: see vmmgraph_peer_map_create().
    PeerMap(const Device& device, const std::vector<PeerExtent>& extents) {
        std::vector<vmmgraph_peer_extent_t> given;
        given.reserve(extents.size());
        for (const PeerExtent& extent : extents) {
            given.push_back({extent.page == nullptr ? nullptr : extent.page->handle(),
                             extent.offset, extent.bytes});
        }
        vmmgraph_peer_map_t handle = nullptr;
        detail::check(vmmgraph_peer_map_create(device.handle(), given.data(), given.size(), &handle,
                                               &address_));
        handle_ = detail::Owned<vmmgraph_peer_map_t, vmmgraph_peer_map_destroy>(handle);
    }

    // Address of the range.
    [[nodiscard]] void* address() const noexcept { return address_; }
    // Records that `stream` uses the range; the stream must exist until destruction. Other work
    // must be done by then.
    void used_by(void* stream) { detail::check(vmmgraph_peer_map_used_by(handle(), stream)); }
    [[nodiscard]] vmmgraph_peer_map_t handle() const noexcept { return handle_.get(); }

private:
    detail::Owned<vmmgraph_peer_map_t, vmmgraph_peer_map_destroy> handle_;
    void* address_ = nullptr;
};

// Sends descriptors and bytes as one message over a connected unix socket. See
// vmmgraph_send_descriptors().
inline std::size_t send_descriptors(int socket, const std::vector<int>& descriptors,
                                    const void* bytes, std::size_t length) {
    std::uint64_t sent = 0;
    detail::check(vmmgraph_send_descriptors(socket, descriptors.data(), descriptors.size(), bytes,
                                            length, &sent));
    return static_cast<std::size_t>(sent);
}

// One received message.
struct Received {
    // 0: the other side has closed.
    std::size_t bytes = 0;
    std::vector<Descriptor> descriptors;
};

// Receives a message of send_descriptors: as many bytes as fit, and all descriptors.
inline Received receive_descriptors(int socket, void* bytes, std::size_t length) {
    // Maximum per message.
    int fds[253];
    std::uint64_t received = 0;
    std::size_t count = 0;
    Received result;
    // Reserved first, so nothing throws once the descriptors are owned.
    result.descriptors.reserve(sizeof fds / sizeof *fds);
    detail::check(vmmgraph_receive_descriptors(socket, bytes, length, &received, fds,
                                               sizeof fds / sizeof *fds, &count));
    result.bytes = static_cast<std::size_t>(received);
    for (std::size_t i = 0; i < count; ++i) {
        result.descriptors.emplace_back(fds[i]);
    }
    return result;
}

}  // namespace vmmgraph

#endif  // VMMGRAPH_SHARE_HPP
