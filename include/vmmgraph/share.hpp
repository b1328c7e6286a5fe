// VmmGraph's pages for other processes, for C++17: what is behind a range, a page exported and pinned, another process's range mapped. Header-only over
// vmmgraph.h; conventions as in vmmgraph.hpp.
//
//   options.sharing = vmmgraph::Sharing::fd;                                         // when the device is opened
//   for (const vmmgraph::PageExtent& part : vmmgraph::export_range(space, block, bytes))
//       exported.try_emplace(part.page, device, part.page);                          // once a page, however many graphs show it
//   vmmgraph::send_descriptors(socket, {exported.at(page).descriptor()}, &page_bytes, sizeof page_bytes);
//
//   vmmgraph::PeerPage page(device, descriptor, page_bytes);                         // in the other process
//   vmmgraph::PeerMap range(device, {{&page, offset, bytes}});                       // range.address(): memory of both

#ifndef VMMGRAPH_SHARE_HPP
#define VMMGRAPH_SHARE_HPP

#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "arena.hpp"

namespace vmmgraph {

// A part of a page and where it shows: page, offset, bytes, address, page_bytes. Pages are numbers that no other page of the device has or had.
using PageExtent = vmmgraph_page_extent_t;

namespace detail {

template <class Handle, class Export>
[[nodiscard]] std::vector<PageExtent> extents_of(Export export_range, Handle handle, void* base, std::size_t bytes) {
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

// The pages behind a range of the space's addresses, such as a block's, in order. Asks nothing of the driver and pins nothing. A seal may exchange pages
// under retained blocks: ask again after it. Throws for addresses that are not the space's, and for a range that has not pages all over.
[[nodiscard]] inline std::vector<PageExtent> export_range(const Space& space, void* base, std::size_t bytes) {
    return detail::extents_of(vmmgraph_space_export, space.handle(), base, bytes);
}

// The page behind an exclusive block of the arena, or behind a part of one: one extent, the same for as long as the block lives. Throws for all else.
[[nodiscard]] inline std::vector<PageExtent> export_range(const SharedVmmAllocator& arena, void* base, std::size_t bytes) {
    return detail::extents_of(vmmgraph_arena_export, arena.handle(), base, bytes);
}

// A file descriptor with one owner.
class Descriptor {
public:
    Descriptor() noexcept = default;
    explicit Descriptor(int descriptor) noexcept : descriptor_(descriptor) {}
    Descriptor(Descriptor&& other) noexcept : descriptor_(other.release()) {}
    Descriptor& operator=(Descriptor&& other) noexcept {
        // In this order, moving to itself changes nothing.
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

    // Still owned by this object; -1 if there is none.
    [[nodiscard]] int get() const noexcept { return descriptor_; }
    // The caller's from now on.
    [[nodiscard]] int release() noexcept { return std::exchange(descriptor_, -1); }

private:
    int descriptor_ = -1;
};

// A page of an arena that other processes have: while it lives the page is not given back, lent, paused, or exchanged for another. Ends when every
// process that has the page has closed it. The device outlives it.
class ExportedPage {
public:
    // Throws if the device was opened without sharing, and for what is no page of an arena as export_range names it.
    ExportedPage(const Device& device, std::uint64_t page) : device_(device.handle()), page_(page) {
        int descriptor = -1;
        detail::check(vmmgraph_device_export_page(device_, page_, &descriptor));
        descriptor_ = Descriptor(descriptor);
    }
    ExportedPage(const ExportedPage&) = delete;
    ExportedPage& operator=(const ExportedPage&) = delete;
    // Nobody is left to tell: only a device that was closed before refuses.
    ~ExportedPage() { static_cast<void>(vmmgraph_device_page_exported(device_, page_, -1)); }

    // Its number.
    [[nodiscard]] std::uint64_t page() const noexcept { return page_; }
    // What other processes import it by, still owned by this object; -1 once it is closed.
    [[nodiscard]] int descriptor() const noexcept { return descriptor_.get(); }
    // Closes the descriptor, which is not needed when it was sent. The page stays pinned.
    void close_descriptor() noexcept { descriptor_ = Descriptor(); }

private:
    vmmgraph_device_t device_;
    std::uint64_t page_;
    Descriptor descriptor_;
};

// By what another process imports a page over the fabric: plain bytes.
using FabricHandle = vmmgraph_fabric_handle_t;

// A page of an arena for processes of other hosts too, on a device that was granted Sharing::fabric, pinned as an ExportedPage is: what it returns is good
// until as many pins as there are such calls are taken away with vmmgraph_device_page_exported(device.handle(), page, -1).
[[nodiscard]] inline FabricHandle export_fabric(const Device& device, std::uint64_t page) {
    FabricHandle handle{};
    detail::check(vmmgraph_device_export_fabric(device.handle(), page, &handle));
    return handle;
}

// A page of another process, imported once, however many ranges show it. Its memory stays as long as this or a range of it does, whatever its owner does.
class PeerPage {
public:
    // `bytes` is what its owner's PageExtent calls page_bytes. The descriptor is not needed afterwards. Throws for what is no page.
    PeerPage(const Device& device, int descriptor, std::uint64_t bytes) {
        vmmgraph_peer_page_t handle = nullptr;
        detail::check(vmmgraph_device_import(device.handle(), descriptor, bytes, &handle));
        handle_ = detail::Owned<vmmgraph_peer_page_t, vmmgraph_peer_page_close>(handle);
    }

    // As above, by a handle of the fabric, on a device that was granted Sharing::fabric.
    PeerPage(const Device& device, const FabricHandle& fabric, std::uint64_t bytes) {
        vmmgraph_peer_page_t handle = nullptr;
        detail::check(vmmgraph_device_import_fabric(device.handle(), &fabric, bytes, &handle));
        handle_ = detail::Owned<vmmgraph_peer_page_t, vmmgraph_peer_page_close>(handle);
    }

    // The C handle, still owned by this object; null if moved from.
    [[nodiscard]] vmmgraph_peer_page_t handle() const noexcept { return handle_.get(); }

private:
    detail::Owned<vmmgraph_peer_page_t, vmmgraph_peer_page_close> handle_;
};

// A part of another process's page, as its owner's PageExtent says it.
struct PeerExtent {
    const PeerPage* page = nullptr;
    std::uint64_t offset = 0;
    std::uint64_t bytes = 0;
};

// A range of another process at addresses of this one's, in one piece. At its end its pages go behind what the noted streams were given by then.
class PeerMap {
public:
    // Throws for parts that do not make one range: all but the first begin where their page does, and all but the last end there.
    PeerMap(const Device& device, const std::vector<PeerExtent>& extents) {
        std::vector<vmmgraph_peer_extent_t> given;
        given.reserve(extents.size());
        for (const PeerExtent& extent : extents) {
            given.push_back({extent.page == nullptr ? nullptr : extent.page->handle(), extent.offset, extent.bytes});
        }
        vmmgraph_peer_map_t handle = nullptr;
        detail::check(vmmgraph_peer_map_create(device.handle(), given.data(), given.size(), &handle, &address_));
        handle_ = detail::Owned<vmmgraph_peer_map_t, vmmgraph_peer_map_destroy>(handle);
    }

    // Where the range begins.
    [[nodiscard]] void* address() const noexcept { return address_; }
    // Notes that work of `stream`, which exists until this ends, uses the range. Other work is done by then.
    void used_by(void* stream) { detail::check(vmmgraph_peer_map_used_by(handle(), stream)); }
    // The C handle, still owned by this object; null if moved from.
    [[nodiscard]] vmmgraph_peer_map_t handle() const noexcept { return handle_.get(); }

private:
    detail::Owned<vmmgraph_peer_map_t, vmmgraph_peer_map_destroy> handle_;
    void* address_ = nullptr;
};

// Sends descriptors, at most 253, and some bytes, at least one, as one message over a connected unix socket (SCM_RIGHTS); how many of the bytes went.
// The descriptors stay the caller's.
inline std::size_t send_descriptors(int socket, const std::vector<int>& descriptors, const void* bytes, std::size_t length) {
    std::uint64_t sent = 0;
    detail::check(vmmgraph_send_descriptors(socket, descriptors.data(), descriptors.size(), bytes, length, &sent));
    return static_cast<std::size_t>(sent);
}

// What one message had.
struct Received {
    // 0: the other side has closed.
    std::size_t bytes = 0;
    std::vector<Descriptor> descriptors;
};

// Receives what send_descriptors sent: as many of the bytes as there is room for, and all descriptors.
inline Received receive_descriptors(int socket, void* bytes, std::size_t length) {
    // No message has more.
    int fds[253];
    std::uint64_t received = 0;
    std::size_t count = 0;
    Received result;
    // First, so that nothing throws once they are ours.
    result.descriptors.reserve(sizeof fds / sizeof *fds);
    detail::check(vmmgraph_receive_descriptors(socket, bytes, length, &received, fds, sizeof fds / sizeof *fds, &count));
    result.bytes = static_cast<std::size_t>(received);
    for (std::size_t i = 0; i < count; ++i) {
        result.descriptors.emplace_back(fds[i]);
    }
    return result;
}

}  // namespace vmmgraph

#endif  // VMMGRAPH_SHARE_HPP
