//! Calls with counters and injected failures.

standin::counted_calls! {
    cnMemAddressReserve, cnMemAddressFree, cnMemCreate, cnMemRelease, cnMemMap, cnMemSetAccess, cnMemUnmap, cnMemGetInfo,
    cnCreateNotifier, cnDestroyNotifier, cnPlaceNotifier, cnQueryNotifier, cnWaitNotifier, cnQueueWaitNotifier, cnCreateQueue,
    cnDestroyQueue, cnQueueIsCapturing, cnMemsetD32Async, cnMemcpyDtoHAsync_V2, cnMemcpyHtoDAsync_V2
}
