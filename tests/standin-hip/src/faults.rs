//! The calls that are counted and can be made to fail.

standin::counted_calls! {
    hipMemAddressReserve, hipMemAddressFree, hipMemCreate, hipMemRelease, hipMemMap, hipMemUnmap, hipMemSetAccess,
    hipEventCreateWithFlags, hipEventDestroy, hipEventRecord, hipEventQuery, hipStreamWaitEvent, hipEventSynchronize,
    hipStreamIsCapturing, hipMemGetInfo, hipStreamCreateWithFlags, hipStreamDestroy, hipStreamSynchronize, hipHostRegister,
    hipHostUnregister, hipMemcpyAsync, hipMemsetD32Async
}
