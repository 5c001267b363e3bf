// swift-tools-version: 6.0
import PackageDescription

// What the sample app's screens show and do, without a screen: so that it is compiled and tested where there is no SwiftUI.
let package = Package(
    name: "SampleModels",
    platforms: [.iOS(.v17), .macOS(.v14)],
    products: [.library(name: "SampleModels", targets: ["SampleModels"])],
    dependencies: [.package(path: "../../Lesonnx")],
    targets: [
        .target(
            name: "SampleModels",
            dependencies: [
                .product(name: "Lesonnx", package: "Lesonnx"), .product(name: "LesonnxScheduler", package: "Lesonnx"),
                .product(name: "LesonnxStore", package: "Lesonnx"),
            ]),
        .testTarget(name: "SampleModelsTests", dependencies: ["SampleModels"]),
    ]
)
