//! Calls with counters and injected failures.

standin::counted_calls! {
    hipMemAddressReserve, hipMemAddressFree, hipMemCreate, hipMemRelease, hipMemMap, hipMemUnmap, hipMemSetAccess,
    hipEventCreateWithFlags, hipEventDestroy, hipEventRecord, hipEventQuery, hipStreamWaitEvent, hipEventSynchronize,
    hipStreamIsCapturing, hipMemGetInfo, hipStreamCreateWithFlags, hipStreamDestroy, hipStreamSynchronize, hipHostRegister,
    hipHostUnregister, hipMemcpyAsync, hipMemsetD32Async
}
