import Foundation
import LesonnxScheduler

/// The drafter of a bundle that the options name; nil for `none`. Throws `input` where the bundle has no such drafter, or the draft
/// model is not one for it.
func makeDrafter(_ options: LoadOptions, for bundle: ModelBundle, _ environment: OrtEnvironment) throws -> (any Drafter)? {
    switch options.draft {
    case .none:
        return nil
    case .ngram:
        return NgramDrafter()
    case .draftModel:
        // `LoadOptions.check` has seen to it that there is one.
        guard let folder = options.draftModel else { return nil }
        return try DraftModelDrafter(for: bundle, ModelBundle(directory: folder), options.engine, environment)
    case .dspark:
        return try DSparkDrafter(bundle, environment)
    case .mtp:
        throw LesonnxError.input("\(bundle.directory.path(percentEncoded: false)): this bundle has no mtp drafter")
    }
}
