/// What can go wrong while a bundle comes to the device. Each text is one line that names the file, what was expected and what was found.
public enum StoreError: Error, Equatable {
    case notABundle(String)
}
